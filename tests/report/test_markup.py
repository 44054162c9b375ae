"""Docstrings on a terminal."""

from __future__ import annotations

from fedgrove.report.markup import laid_out, plain

DOC = """Method: what it does.

Round :math:`t`, weights :math:`\\lambda_k`, **bold** and `a link`_; see :class:`~fedgrove.core.Give`
and :func:`the mean <fedgrove.trees.mean>`::

    w_k = min CE + mu/2 |w - w_ref|^2 from w_c, a few more words              -> Train
    w   = mean                                                                -> WeightedMean

- one item that is long enough to be broken into two lines, as one sees
- another
"""


def test_golden_at_sixty_columns() -> None:
    expected = """Method: what it does.

Round t, weights lambda_k, bold and a link; see
fedgrove.core.Give and the mean:

    w_k = min CE + mu/2 |w - w_ref|^2 from w_c, a few more
        words                                       -> Train
    w   = mean                               -> WeightedMean

- one item that is long enough to be broken into two lines,
  as one sees
- another"""
    assert laid_out(DOC, 60) == expected


def test_where_there_is_room_equations_stay_as_they_were_written() -> None:
    rows = laid_out(DOC, 100).splitlines()
    assert [row for row in rows if "->" in row] == DOC.splitlines()[5:7]


def test_signs_that_are_no_markup_stay() -> None:
    assert plain("a * b * c, 2 ** 3, n_k_") == "a * b * c, 2 ** 3, n_k_"
