"""The ``parameters`` of a model's configuration, and the engine that they describe.

Invariants: an empty value and an unfilled placeholder (``${name}``) mean the default; a parameter of
TensorRT-LLM's repository that cannot be honoured is refused if it would change tokens, and named in a
warning if it only tunes memory or scheduling.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trtllm_av.runtime.errors import UsageError
from trtllm_av.runtime.loading import load_engine
from trtllm_av.runtime.params import SpeculativeConfig
from trtllm_av.runtime.scheduler import Engine
from trtllm_av.triton_model_repo.text_codec import load_tokenizer

T = TypeVar("T", int, str, bool)

# oneDNN keeps the code of the last 1,024 matrix shapes, 0.4 MB each, and batches of tokens bring new shapes for as
# long as a server runs. The last 256 hold those that recur; 64 do not, and compiling again costs time.
_ONEDNN_SHAPES = "256"

_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")

# They choose what is generated, or name a file that would not be read.
REFUSED = {
    "encoder_model_path": "there are no encoder-decoder models",
    "guided_decoding_backend": "guided decoding is not implemented",
    "medusa_choices": "trees are not implemented; name a drafter in av_speculative_config",
    "eagle_choices": "trees are not implemented; name a drafter in av_speculative_config",
    "lookahead_window_size": "name a drafter in av_speculative_config",
    "lookahead_ngram_size": "name a drafter in av_speculative_config",
    "lookahead_verification_set_size": "name a drafter in av_speculative_config",
    "lora_prefetch_dir": "LoRA is not implemented",
    "av_plugin_path": "the torch executor has its operations built in",
}
USED = {
    "gpt_model_path", "exclude_input_in_output", "max_beam_width", "max_queue_size", "tokenizer_dir",
    "av_mode", "av_speculative_config", "av_config_path", "av_max_batch_size", "av_max_seq_len",
    "av_cost_table", "av_device", "FORCE_CPU_ONLY_INPUT_TENSORS",
}  # fmt: skip


class Parameters:
    """Filled-in parameters of one model."""

    def __init__(self, model_config: Mapping[str, Any]) -> None:
        texts = {
            name: str(entry.get("string_value", "")).strip()
            for name, entry in model_config.get("parameters", {}).items()
        }
        self._texts = {
            name: text for name, text in texts.items() if text and not text.startswith("${")
        }
        self._num_instances = sum(
            group.get("count", 1) * max(1, len(group.get("gpus", ())))
            for group in model_config.get("instance_group", ())
        )

    def get(self, name: str, kind: Callable[[str], T], default: T | None = None) -> T | None:
        """The value as ``kind`` (int, str or bool), or ``default``."""
        text = self._texts.get(name)
        if text is None:
            return default
        if kind is bool:
            if text.lower() not in _TRUE + _FALSE:
                raise UsageError(f"parameter {name}={text!r} is neither true nor false")
            return text.lower() in _TRUE
        try:
            return kind(text)
        except ValueError:
            raise UsageError(f"parameter {name}={text!r} is not a whole number") from None

    def check(self) -> list[str]:
        """Names of filled parameters without an effect here; UsageError for those that are refused.

        So are several instances: Triton hands a ``stop`` to the next one, not to the one with the request,
        and all of them would write the same gauges.
        """
        if self._num_instances > 1:
            raise UsageError(
                f"instance_group asks for {self._num_instances} instances of an engine; leave its "
                "count at 1, and start a server of its own for each further device"
            )
        for name, reason in REFUSED.items():
            if name in self._texts:
                raise UsageError(
                    f"parameter {name}={self._texts[name]!r} is not supported: {reason}; leave it empty"
                )
        if (beams := self.get("max_beam_width", int, 1)) != 1:
            raise UsageError(f"parameter max_beam_width={beams} is not supported; leave it at 1")
        return sorted(self._texts.keys() - USED)

    def speculative_config(self) -> SpeculativeConfig:
        """From ``av_speculative_config`` (JSON) or ``av_config_path`` (a file of it), and ``av_mode``."""
        text, path = self.get("av_speculative_config", str), self.get("av_config_path", str)
        if text is not None and path is not None:
            raise UsageError("av_speculative_config and av_config_path exclude each other; set one")
        if path is not None:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except OSError as error:
                raise UsageError(
                    f"av_config_path={path!r}: {error.strerror}; name a file"
                ) from None
        config = SpeculativeConfig.from_json(text or "{}")
        mode = self.get("av_mode", str)
        if mode is None:
            return config
        return SpeculativeConfig.from_json(
            json.dumps(config.model_dump(exclude_unset=True) | {"av_mode": mode})
        )

    def load_engine(self) -> Engine:
        """The engine of this model; raises what ``runtime.loading.load_engine`` raises."""
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_SHAPES)
        model = self.get("gpt_model_path", str)
        if model is None:
            raise UsageError(
                "parameter gpt_model_path is empty; name an engine, a model folder or smollm2"
            )
        engine = load_engine(
            model,
            self.speculative_config(),
            max_batch_size=self.get("av_max_batch_size", int),
            max_seq_len=self.get("av_max_seq_len", int),
            cost_table=self.get("av_cost_table", str),
            device=self.get("av_device", str) or "cpu",
        )
        if engine.tokenizer is None and (folder := self.get("tokenizer_dir", str)) is not None:
            engine.tokenizer = load_tokenizer(folder)
        return engine
