"""The card to print: every silent failure stands on an arrow, and the committed pages are the registry's."""

import re

import pytest
from typer.testing import CliRunner

from failurelab import failures
from failurelab_course import card, cli, eras
from failurelab_course.notebook.pictures import loop


@pytest.mark.parametrize("language", card.PAGES)
def test_the_committed_card_says_what_the_registry_says(language):
    page = (eras.root() / card.PAGES[language]).read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", card.draw(language))
    assert texts == drawn
    lines = card.read_lines(language)
    assert [line.arrow for line in lines] == sorted((line.arrow for line in lines), key=list(loop.ARROWS).index)
    for line in lines:
        assert {line.id, line.short, line.look, line.healthy} <= set(texts)
    assert len(lines) + 6 == len(failures.all())


@pytest.mark.parametrize(("old", "new"), [("[F7]", "[F77]"), ('arrow = "rewards"', 'arrow = "reward"')])
def test_a_slip_in_the_file_is_told(tmp_path, old, new):
    text = (card.HERE / "card.toml").read_text(encoding="utf-8")
    (tmp_path / "card.toml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(card.CardError):
        card.read_lines("en", tmp_path / "card.toml")


def test_the_command_prints_svg_or_a_line():
    done = CliRunner().invoke(cli.app, ["card", "--lang", "zh"])
    assert done.exit_code == 0 and "奖励不涨" in done.output and "<svg" in done.output
    wrong = CliRunner().invoke(cli.app, ["card", "--lang", "fr"])
    assert wrong.exit_code == 2 and "the card is in en and zh" in " ".join(wrong.output.split())
