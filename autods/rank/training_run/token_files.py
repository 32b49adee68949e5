"""Files of token ids as a dataset: cut into samples of one length, read as they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import InputError
from ...files import check_is_file
from ...workload.protocol import WorkloadError

_HINT = "give a .npy file of token ids, or a .bin file of uint16 or uint32"
_LOOKED_AT = 2**20  # tokens at the beginning of a file that are checked before training


class TokenDataset:
    """Samples of `length` consecutive token ids: a dict of input_ids and labels, which are the same.

    The last tokens that fill no sample are left out.
    """

    def __init__(self, path: str, length: int, vocabulary: int) -> None:
        self.path, self.length, self.vocabulary = path, length, vocabulary
        self.tokens = _open_tokens(Path(path))
        if len(self) < 1:
            raise WorkloadError(
                f"has {len(self.tokens)} tokens, fewer than one sample of {length}", place=path, hint="lower --seq-len"
            )
        self._check(self.tokens[:_LOOKED_AT])

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        tokens = self.tokens[index * self.length : (index + 1) * self.length].astype("int64")
        self._check(tokens)
        ids = torch.from_numpy(tokens)
        return {"input_ids": ids, "labels": ids}

    def _check(self, tokens: Any) -> None:
        """Raises WorkloadError for a token that the model does not know."""
        if (largest := int(tokens.max())) >= self.vocabulary or int(tokens.min()) < 0:
            worst = largest if largest >= self.vocabulary else int(tokens.min())
            raise WorkloadError(
                f"has the token {worst}, and the config has a vocabulary of {self.vocabulary}",
                place=self.path,
                hint="give tokens of the model's own tokenizer",
            )


def _open_tokens(path: Path) -> Any:
    """Map the file's tokens, in a flat array. Raises WorkloadError for a file that has none."""
    import numpy

    try:
        check_is_file(path.stat(), str(path))
        if path.suffix == ".npy":
            tokens = numpy.load(path, mmap_mode="r").reshape(-1)
            if tokens.dtype.kind not in "ui":
                raise ValueError(f"it holds {tokens.dtype}")
        elif path.suffix == ".bin":
            if path.stat().st_size % 2:
                raise ValueError("it has an odd number of bytes")
            tokens = numpy.memmap(path, dtype="<u2", mode="r")
            if len(tokens) % 2 == 0 and _is_wide(tokens):
                tokens = tokens.view("<u4")
        else:
            raise ValueError(f"its name ends in {path.suffix!r}")
    except InputError as error:
        raise WorkloadError(error.problem, place=str(path), hint=_HINT) from None
    except OSError as error:
        raise WorkloadError(f"cannot be read: {error.strerror}", place=str(path), hint=_HINT) from None
    except ValueError as error:
        raise WorkloadError(f"is not a file of tokens: {error}", place=str(path), hint=_HINT) from None
    return tokens


def _is_wide(words: Any) -> bool:
    """Whether words of 16 bits are the halves of 32: no text has a token below 16 in every second place."""
    return len(words) > 0 and int(words[1 : 2 * _LOOKED_AT : 2].max()) < 16
