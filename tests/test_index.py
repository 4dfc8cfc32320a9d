"""Index arithmetic: an axis is split where a view splits it, and never without end."""
from __future__ import annotations

import pytest

from flashfx.passes.index import Affine, NotAffine, SplitAxis, unflatten


def test_a_view_asks_for_a_split():
    with pytest.raises(SplitAxis) as asked:
        unflatten(Affine.axis("b"), (4, 3), {"b": 12})
    assert (asked.value.axis, asked.value.inner) == ("b", 3)


def test_a_split_that_splits_nothing_is_not_asked_for():
    """A relative shift: i * 4 + j + 1 walks from row to row of 5; j has 5 positions already, asked to split it one would be asked again."""
    with pytest.raises(NotAffine):
        unflatten(Affine.axis("j") + Affine((), 1), (4, 5), {"j": 5})
