"""A client of the gRPC server, and a command: `python -m serving.rpc.client localhost:50051 --prompt Hi`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from lorajax.errors import LoraJaxError
from serving.engine import Prompt
from serving.rpc import lorajax_pb2 as pb
from serving.rpc import lorajax_pb2_grpc as pb_grpc
from serving.rpc.messages import from_sampling_params, token_ids_or_text
from serving.sampling_params import SamplingParams


class RpcClient:
    """Calls a server at "host:port". Answers are messages of `lorajax.proto`; errors are grpc.RpcError.

    token: bearer token. root_certificates: PEM file that vouches for the server; with it the connection
    is TLS. timeout: seconds that a call may take; None sets no limit. A context manager.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        root_certificates: Path | None = None,
        max_message_bytes: int = 16 << 20,
        timeout: int | float | None = None,
    ):
        self._timeout = timeout
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
        ]
        if root_certificates is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            credentials = grpc.ssl_channel_credentials(root_certificates.read_bytes())
            self._channel = grpc.secure_channel(target, credentials, options)
        self._generation = pb_grpc.GenerationStub(self._channel)
        self._adapters = pb_grpc.AdaptersStub(self._channel)
        self._engine = pb_grpc.EngineStub(self._channel)

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> pb.GenerateResponse:
        """The whole answer. options: adapter, request_id, priority, cache_salt."""
        return self._call(self._generation.Generate, _request(prompt, sampling_params, **options))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[pb.GenerateChunk]:
        """The answer as it grows; see `generate`. Closing the iterator aborts the request."""
        call = self._call(self._generation.GenerateStream, _request(prompt, sampling_params, **options))
        try:
            yield from call
        finally:
            call.cancel()

    def score(self, prompt: Prompt, completion: Prompt, *, adapter: str | None = None) -> pb.ScoreResponse:
        request = pb.ScoreRequest(
            adapter=adapter or "",
            **token_ids_or_text(prompt, "prompt_text", "prompt_token_ids"),
            **token_ids_or_text(completion, "completion_text", "completion_token_ids"),
        )
        return self._call(self._generation.Score, request)

    def load_adapter(
        self, name: str, source: str, *, pinned: bool = False, replace: bool = False
    ) -> pb.AdapterStatus:
        """source: a folder on the server, below one from which it may load."""
        request = pb.LoadAdapterRequest(name=name, source=source, pinned=pinned, replace=replace)
        return self._call(self._adapters.LoadAdapter, request).adapter

    def unload_adapter(self, name: str, *, timeout: int | float | None = None) -> int:
        """timeout: seconds the server waits for running requests, then UNAVAILABLE."""
        request = pb.UnloadAdapterRequest(name=name, timeout=timeout)
        return self._call(self._adapters.UnloadAdapter, request).num_waited_for

    def adapters(self) -> list[pb.AdapterStatus]:
        return list(self._call(self._adapters.ListAdapters, pb.ListAdaptersRequest()).adapters)

    def stats(self) -> pb.EngineStats:
        return self._call(self._engine.GetStats, pb.GetStatsRequest())

    def kv_events(self) -> Iterator[pb.KvEvent]:
        """Events of the prefix cache from now on. Returns when the server has subscribed."""
        call = self._engine.SubscribeKvEvents(pb.SubscribeKvEventsRequest(), metadata=self._metadata)
        call.initial_metadata()
        return call

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "RpcClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        return method(request, timeout=self._timeout, metadata=self._metadata)


def _request(
    prompt: Prompt,
    sampling_params: SamplingParams | None,
    *,
    adapter: str | None = None,
    request_id: str = "",
    priority: int = 0,
    cache_salt: str | None = None,
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        **token_ids_or_text(prompt, "text", "token_ids"),
        sampling_params=from_sampling_params(sampling_params or SamplingParams()),
        adapter=adapter or "",
        request_id=request_id,
        priority=priority,
        cache_salt=cache_salt,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Stream one answer to the terminal, or list the server's adapters. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m serving.rpc.client", description="Ask a lorajax server.")
    parser.add_argument("target", help="host:port")
    parser.add_argument("--prompt", help="text to complete; without it, the adapters are listed")
    parser.add_argument("--adapter", help="name of an adapter (default: the base model)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    parser.add_argument("--token", help="bearer token of the server")
    parser.add_argument("--root-certificates", type=Path, help="PEM file; speak TLS")
    parser.add_argument("--timeout", type=float, help="seconds the call may take (default: no limit)")
    arguments = parser.parse_args(argv)
    try:
        with RpcClient(
            arguments.target,
            token=arguments.token,
            root_certificates=arguments.root_certificates,
            timeout=arguments.timeout,
        ) as client:
            _ask(client, arguments) if arguments.prompt is not None else _list(client)
    except grpc.RpcError as error:
        call: Any = error
        print(f"{call.code().name}: {call.details()}", file=sys.stderr)
        return 2
    except (LoraJaxError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _ask(client: RpcClient, arguments: argparse.Namespace) -> None:
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    for chunk in client.stream(arguments.prompt, params, adapter=arguments.adapter):
        print("".join(completion.text for completion in chunk.completions), end="", flush=True)
    print()


def _list(client: RpcClient) -> None:
    for adapter in client.adapters():
        print(f"{adapter.name}\trank {adapter.rank}\t{adapter.state}\t{adapter.source}")


if __name__ == "__main__":
    sys.exit(main())
