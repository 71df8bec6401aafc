"""A request's view of its own tokens."""

from hypothesis import given
from hypothesis import strategies as st

from serving.request import FinishReason, Request
from serving.sampling_params import SamplingParams

TOKENS = st.lists(st.integers(0, 100), max_size=8)


@given(prompt=TOKENS.filter(len), output=TOKENS, data=st.data())
def test_tokens_are_prompt_then_output(prompt, output, data):
    request = Request(
        request_id="r", prompt_token_ids=prompt, params=SamplingParams(), output_token_ids=output
    )
    tokens = prompt + output
    assert (request.num_prompt_tokens, request.num_tokens) == (len(prompt), len(tokens))
    end = data.draw(st.integers(0, len(tokens)))
    start = data.draw(st.integers(0, end))
    assert request.token_ids(start, end) == tokens[start:end]


def test_finish_reasons_are_the_words_of_the_api():
    assert {reason.value for reason in FinishReason} == {"stop", "length", "abort", "error"}
