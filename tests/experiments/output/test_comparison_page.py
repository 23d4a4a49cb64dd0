import re
import xml.etree.ElementTree as ElementTree

from experiments.output import comparison_page


def test_the_page_is_well_formed_and_has_all_numbers(comparison):
    _, report, text = comparison
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    svg = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{svg}svg")) == 2
    shown = "".join(root.itertext())
    for one in report["measured"]:
        assert f" {one['gradients']['microseconds']:.1f} " in shown
    for difference in report["measured"][1]["differences"]:
        assert f" {difference['relative']:.1e} " in shown
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    for reference in re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text):
        assert ids.count(reference) == 1


def test_the_page_asks_for_nothing_from_elsewhere(comparison):
    root = ElementTree.fromstring(comparison[2].removeprefix("<!DOCTYPE html>"))
    assert not {element.tag for element in root.iter()} & {"script", "link", "img", "iframe", "object", "base"}
    for element in root.iter():
        for name, value in element.attrib.items():
            if name.rpartition("}")[2] in ("href", "src", "srcset", "action", "data"):
                assert value.startswith("#")
    assert all(inside.startswith("#") for inside in re.findall(r"url\(([^)]*)\)", comparison[2]))
    assert "@import" not in comparison[2]


def test_the_page_is_for_day_and_night_and_for_phones(comparison):
    text = comparison[2]
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert "currentColor" in text and comparison_page._TEXT not in text
