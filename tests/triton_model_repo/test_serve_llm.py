"""The model ``llm`` on a real Triton server: load, abuse, clients that leave, and the server's end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.triton_server import free_ports
from tests.triton_model_repo.conftest import SPECULATIVE
from tests.triton_model_repo.serving import Server, Streams, serve
from trtllm_av.runtime.api import LLM, SamplingParams

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def llm(tiny_folder: Path, cost_table: Path) -> LLM:
    return LLM(tiny_folder, SPECULATIVE, cost_table=cost_table)


def shared_memory_of(server: Server) -> list[Path]:
    return list(Path("/dev/shm").glob(f"trtllm_av_{server.process.pid}_*"))


def stubs_of(server: Server) -> list[int]:
    """Running processes of the server's own process group, without the server."""
    columns = ["ps", "-eo", "pid=,pgid=,stat="]
    listing = subprocess.run(columns, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return [
        int(pid)
        for pid, group, state in rows
        if int(group) == server.pid != int(pid) and not state.startswith("Z")
    ]


def test_mixed_streams_with_cancellations_all_end(llm_server: Server, llm: LLM) -> None:
    """Guards against streams that hang, mix up, change greedy tokens under load, or leak slots."""
    prompts = [f"prompt {n}" for n in range(32)]
    lengths = [4 + 5 * (n % 12) for n in range(32)]
    greedy = [
        SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=False) for length in lengths
    ]
    expected = [output.outputs[0].text for output in llm.generate(prompts, greedy)]
    leaving = [Streams(llm_server) for _ in range(8)]
    for n, gone in enumerate(leaving):
        gone.send("llm", {"text_input": f"gone {n}", "max_tokens": 240, "stream": True})
    texts: dict[str, str] = defaultdict(str)
    with Streams(llm_server) as streams:
        for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            fields: dict[str, Any] = {"text_input": prompt, "max_tokens": length, "stream": True}
            if n % 2:  # sampled ones keep the batch mixed
                fields |= {"temperature": 0.8, "top_p": 0.9, "seed": n}
            streams.send("llm", fields, request_id=str(n))
        for gone in leaving:
            gone.next()
            gone.close(cancel=True)
        num_open = 32
        while num_open:
            result, is_last = streams.next()
            num_open -= is_last
            response = result.get_response()
            if response.outputs:
                texts[response.id] += result.as_numpy("text_output")[0].decode()
    for n in range(0, 32, 2):
        assert texts[str(n)] == expected[n]
    llm_server.wait_until_idle()
    assert llm_server.used_slots() == 0


def test_closed_event_stream_frees_the_slot(llm_server: Server) -> None:
    """Guards against web clients that vanish and leave their request decoding."""
    llm_server.wait_until_idle()
    body = json.dumps({"text_input": "abc", "max_tokens": 240, "stream": True}).encode()
    head = f"POST /v2/models/llm/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    before = llm_server.emitted()
    host, port = llm_server.http.split(":")
    for _ in range(4):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}\r\n\r\n".encode() + body)
            assert connection.recv(1024)
    llm_server.wait_until_idle()
    assert llm_server.emitted() - before < 4 * 240


def test_counts_add_up(llm_server: Server) -> None:
    """Guards against clients that tune by figures which do not belong together."""
    result = llm_server.generate("llm", text_input="hello", max_tokens=40)
    drafted, verified = result["total_draft_tokens"], result["av_verified_draft_tokens"]
    accepted = result["total_accepted_draft_tokens"]
    assert result["num_output_tokens"] == 40 and drafted > 0
    assert drafted == verified + result["av_trimmed_draft_tokens"]
    assert result["acceptance_rate"] == pytest.approx(accepted / verified)
    plain = llm_server.generate("llm", text_input="hello", max_tokens=40, num_draft_tokens=0)
    assert plain["total_draft_tokens"] == 0 and plain["text_output"] == result["text_output"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"text_input": "a", "max_tokens": 4, "tempersture": 1}', "unknown field 'tempersture'"),
        (b'{"text_input": "a"}', "missing required input"),
        (b'{"text_input": 7, "max_tokens": 4}', "non-string as string"),
        (b'{"text_input": "a", "max_tokens": "four"}', "non-signed-integer"),
        (b'{"text_input": ["a", "b"], "max_tokens": 4}', "shape"),
        (b'{"text_input": "a", "max_tokens": 0}', "max_tokens=0"),
        (b'{"text_input": "a", "max_tokens": 2147483647}', "exceeds max_seq_len"),
        (b'{"text_input": "a", "max_tokens": 4, "temperature": -0.5}', "temperature=-0.5"),
        (b'{"text_input": "a", "max_tokens": 4, "top_p": 1.5}', "top_p=1.5"),
        (b'{"text_input": "a", "max_tokens": 4, "top_k": -1}', "top_k=-1"),
        (b'{"text_input": "a", "max_tokens": 4, "seed": 1, "random_seed": 2}', "differ"),
        (
            b'{"text_input": "a", "max_tokens": 4, "num_draft_tokens": 99}',
            "exceeds this engine's 3",
        ),
        (b'{"text_input": "", "max_tokens": 4}', "no tokens"),
        (b'{"text_input": ', "failed to parse"),
        (b'{"text_input": "' + b"a" * 1_000_000 + b'", "max_tokens": 4}', "exceeds max_seq_len"),
    ],
)
def test_wrong_requests_get_one_line_that_names_the_value(
    llm_server: Server, body: bytes, message: str
) -> None:
    """Guards against wrong values that are taken for something, or that stop the server."""
    status, text = llm_server.post("models/llm/generate", body)
    assert status >= 400
    assert message in json.loads(text)["error"]
    assert "Traceback" not in text
    assert llm_server.generate("llm", text_input="a", max_tokens=2)["num_output_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": b"ab\xff"}, "text_input is not UTF-8 at byte 2"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"stop_words": b"\xc3"}, "stop_words is not UTF-8"),
        ({"seed": 2**64 - 1}, "seed=18446744073709551615"),
        ({"max_tokens": np.zeros((2,))}, "shape"),
        ({"temperature": np.zeros((2,))}, "shape"),
    ],
)
def test_wrong_tensors_get_one_line_too(
    llm_server: Server, fields: dict[str, Any], message: str
) -> None:
    """Guards against values that JSON cannot carry and gRPC can."""
    with Streams(llm_server) as streams, pytest.raises(Exception, match=message):
        streams.collect("llm", {"text_input": "a", "max_tokens": 4} | fields)


def test_full_queue_refuses_and_serves_the_rest(llm_server: Server) -> None:
    """Guards against a burst that takes the server down, or that is queued without a bound."""
    llm_server.wait_until_idle()
    served, refused = 0, 0
    with Streams(llm_server) as streams:
        for n in range(200):
            streams.send("llm", {"text_input": f"burst {n}", "max_tokens": 40})
        while served + refused < 200:
            try:
                served += streams.next()[1]
            except Exception as error:
                assert "send this one again later" in str(error)
                refused += 1
    assert served >= 8 + 64 and refused > 0
    llm_server.wait_until_idle()


def test_smollm2_streams_what_the_python_api_says(tmp_path: Path) -> None:
    """Guards against a real tokenizer and a shipped drafter that only work in Python."""
    prompt = "Write one sentence about the sea, with an emoji."
    with (
        serve("smollm2", tmp_path / "log", "--layout", "llm", "--av-mode", "fixed") as server,
        Streams(server) as streams,
    ):
        fields = {"text_input": prompt, "max_tokens": 32, "stream": True}
        parts = streams.collect("llm", fields)
        text = "".join(part.as_numpy("text_output")[0].decode() for part in parts)
        sampled = server.generate(
            "llm", text_input=prompt, max_tokens=32, temperature=0.8, top_p=0.95, random_seed=7
        )
    llm = LLM("smollm2", {"av_mode": "fixed"})
    greedy, drawn = llm.generate(
        prompt, SamplingParams(max_tokens=32, temperature=0.0)
    ) + llm.generate(prompt, SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=7))
    assert text == greedy.outputs[0].text
    assert sampled["text_output"] == drawn.outputs[0].text


def test_a_built_engine_is_served(tmp_path: Path) -> None:
    """Guards against a server that takes checkpoints only, and a built engine that decodes differently."""
    pytest.importorskip("onnxruntime", reason="needs the `onnx` extra")
    from tests.builder.tiny_target import save_random_head, save_target

    target = save_target(tmp_path / "target")
    head = save_random_head(tmp_path / "head.safetensors", target)
    engine = tmp_path / "engine"
    command = [
        sys.executable, "-m", "trtllm_av.builder.cli", "--model_dir", str(target),
        "--output_dir", str(engine), "--backend", "onnx", "--speculative_model", str(head),
        "--max_draft_len", "3", "--max_batch_size", "4", "--max_seq_len", "96",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    [expected] = LLM(target, {"av_mode": "off"}).generate(
        "abc", SamplingParams(max_tokens=24, temperature=0.0)
    )
    arguments = ["--layout", "llm", "--av-mode", "fixed", "--engine-dir", str(engine)]
    with serve(None, tmp_path / "log", *arguments) as server:
        result = server.generate("llm", text_input="abc", max_tokens=24)
    assert result["text_output"] == expected.outputs[0].text
    assert result["total_draft_tokens"] > 0


def test_stop_ends_requests_and_leaves_nothing_behind(tiny_folder: Path, tmp_path: Path) -> None:
    """Guards against orphaned stubs and shared memory, and against a stop that waits for ever."""
    with serve(tiny_folder, tmp_path / "log", "--layout", "llm", "--av-mode", "off") as server:
        assert stubs_of(server) and shared_memory_of(server)
        streams = Streams(server)
        streams.send("llm", {"text_input": "abc", "max_tokens": 240, "stream": True})
        streams.next()
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 30
        streams.close(cancel=True)
    assert not stubs_of(server) and not shared_memory_of(server)


def test_killed_stub_refuses_requests_until_the_model_is_reloaded(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Guards against a dead model that an operator can only mend by restarting the server."""
    with serve(tiny_folder, tmp_path / "log", "--layout", "llm", "--av-mode", "off") as server:
        for pid in stubs_of(server):
            os.kill(pid, signal.SIGKILL)
        status, text = server.post("models/llm/generate", {"text_input": "a", "max_tokens": 2})
        assert status >= 400 and "not healthy" in text
        for verb in ("unload", "load"):
            assert server.post(f"repository/models/llm/{verb}", {})[0] == 200
        end = time.monotonic() + 60
        while server.post("models/llm/generate", {"text_input": "a", "max_tokens": 2})[0] != 200:
            assert time.monotonic() < end, "the model does not come back"
            time.sleep(0.2)
    assert not stubs_of(server) and not shared_memory_of(server)


def test_stub_killed_under_streams_is_mended_or_ends_the_command(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Guards against a half-dead server: either a reload mends it, or the command ends with 1, cleaned up.

    The backend of Triton 2.51 aborts if the stub dies while it holds a lock that both share.
    """
    with serve(tiny_folder, tmp_path / "log", "--layout", "llm", "--av-mode", "off") as server:
        streams = Streams(server)
        for _ in range(12):
            streams.send("llm", {"text_input": "abc", "max_tokens": 240, "stream": True})
        streams.next()
        for pid in stubs_of(server):
            os.kill(pid, signal.SIGKILL)
        time.sleep(1.0)
        try:
            status, text = server.post("models/llm/generate", {"text_input": "a", "max_tokens": 2})
            assert status >= 400 and "not healthy" in text
            for verb in ("unload", "load"):
                assert server.post(f"repository/models/llm/{verb}", {})[0] == 200
            assert server.generate("llm", text_input="a", max_tokens=2)["num_output_tokens"] == 2
        except OSError:
            assert server.process.wait(30) == 1
        streams.close(cancel=True)
    assert not stubs_of(server) and not shared_memory_of(server)


def test_taken_port_and_a_stop_while_loading_leave_nothing_behind(
    llm_server: Server, tiny_folder: Path
) -> None:
    """Guards against a second server that waits for its port, takes the first one down, or outlives a stop."""
    command = [sys.executable, "-m", "trtllm_av.triton_model_repo.serve", "--layout", "llm"]
    command += ["--model", str(tiny_folder), "--av-mode", "off", "--http-port"]
    others = ["--grpc-port", str(free_ports(2)[0]), "--metrics-port", str(free_ports(2)[1])]
    for port, is_stopped, code in (
        (llm_server.http.split(":")[1], False, 1),
        (str(free_ports(1)[0]), True, 0),
    ):
        process = subprocess.Popen(
            [*command, port, *others], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        shared = f"trtllm_av_{process.pid}_*"
        if is_stopped:
            end = time.monotonic() + 60
            while not list(Path("/dev/shm").glob(shared)):  # until then no stub runs
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == code and "ready" not in output
        assert is_stopped or f"error: cannot listen on 127.0.0.1:{port}: Address already" in errors
        assert not list(Path("/dev/shm").glob(shared))
    assert llm_server.generate("llm", text_input="a", max_tokens=2)["num_output_tokens"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such/folder"], "--model='no/such/folder' is no folder"),
        ([], "either --model or --engine-dir"),
        (["--model", ".", "--engine-dir", "."], "either --model or --engine-dir"),
        (["--engine-dir", "."], "--engine-dir='.' holds no engine"),
        (["--model", ".", "--layout", "x"], "choose one of ensemble, llm"),
        (["--model", ".", "--http-port", "8001"], "must differ"),
        (["--model", ".", "--speculative-config", '{"methd": 1}'], "unknown key 'methd'"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str) -> None:
    """Guards against a server that starts half, or a traceback, for a typing mistake."""
    command = [sys.executable, "-m", "trtllm_av.triton_model_repo.serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
