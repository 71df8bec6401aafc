"""The lorajax engine: many LoRA adapters on one base model, in one batch."""

from serving.async_llm import AsyncLLM
from serving.config import EngineConfig
from serving.llm import LLM
from serving.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "SamplingParams"]
