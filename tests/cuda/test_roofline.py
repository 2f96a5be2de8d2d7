"""cuda_src/roofline.cu on the CPU: it reads every word, and writes only for one sum of bits."""

import numpy as np
import pytest

from tests.cuda.build import kernel, launch
from tests.cuda.support import Memory

BLOCKS, COUNT = 2, 2 * 512 * 8 * 2
MAGIC = 0x12345678


@pytest.mark.parametrize("where", [0, 1023, 5000, COUNT - 1])
def test_every_word_is_read(where: int) -> None:
    memory = Memory()
    words = np.zeros((COUNT, 4), np.uint32)
    words[where, where % 4] = MAGIC
    sink = memory.writable(np.zeros(1, np.uint32))
    run = kernel("roofline", "roofline")
    launch(run, (BLOCKS,), 512, sink, memory.read_only(np.zeros_like(words)), COUNT)
    assert sink[0] == 0
    launch(run, (BLOCKS,), 512, sink, memory.read_only(words), COUNT)
    assert sink[0] == MAGIC
    memory.check()
