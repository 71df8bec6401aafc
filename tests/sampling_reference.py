"""Sampling by its definitions, in float64, one token at a time: what the device must agree with."""

import numpy as np


def adjusted(logits, params, prompt, output, end_token_ids):
    """Logits from which the next token is drawn, [vocab] float64."""
    result = []
    for token, logit in enumerate(np.asarray(logits, np.float64).tolist()):
        value = logit + (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        count = list(output).count(token)
        value -= params.frequency_penalty * count + (params.presence_penalty if count else 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = -np.inf
        if len(output) < params.min_tokens and token in end_token_ids:
            value = -np.inf
        result.append(value)
    return np.array(result)


def distribution(logits, params):
    """Probability of each token, [vocab] float64. Equal logits are not thought of."""
    logits = np.asarray(logits, np.float64)
    if params.greedy:
        return np.eye(len(logits))[np.argmax(logits)]
    probs = _softmax(logits / params.temperature)
    kept = probs >= params.min_p * probs.max()
    order = np.argsort(-probs, kind="stable")
    if params.top_k > 0:
        kept[order[params.top_k :]] = False
    probs = np.where(kept, probs, 0.0) / probs[kept].sum()
    before = np.cumsum(probs[order]) - probs[order]  # mass of the better tokens
    probs[order[before >= params.top_p]] = 0.0
    return probs / probs.sum()


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _softmax(logits):
    exps = np.exp(logits - logits.max())
    return exps / exps.sum()
