"""The picture of the first run."""

from __future__ import annotations

from xml.etree import ElementTree

from fedgrove_lab.picture import _place_kilobytes, _place_percent, draw_first_run
from fedgrove_lab.results import read_result


def test_places_by_hand() -> None:
    # 10 kB is two of four decades from 0.1 to 1,000: 60 + 2 / 4 * 550.
    assert _place_kilobytes(10) == 335
    # 75 % of the height of 210, from 250 upwards.
    assert _place_percent(75) == 92.5


def test_every_method_of_the_result_is_in_the_picture() -> None:
    picture = ElementTree.fromstring(draw_first_run())
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {row["name"] for row in read_result("first-run")["rows"]} <= texts
