"""The decks in a real browser: every slide can be read from the back row, and nothing is fetched.

`make slides-test` makes all decks as `make slides` does, opens them from the disk with the network off, and walks
through each with everything shown. Pictures of the slides are kept in `.course/browser/slides`.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
WIDE, HIGH = 1280, 720
SMALLEST = 20  # pixels of a page of 720: a 36th of its height
# What reaches beyond the page sideways (down a slide scrolls), and the smallest letters. Hidden and empty things aside.
LOOK = """wide => {
  const slide = Reveal.getCurrentSlide(), found = [];
  const name = each => `<${each.tagName.toLowerCase()}> ${(each.textContent || each.alt || "").trim().slice(0, 40)}`;
  let small = [1e9, ""];
  for (const each of slide.querySelectorAll("*")) {
    if (each.closest("aside.notes")) continue;
    const box = each.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    if (box.right > wide + 1 || box.left < -1) found.push(`${name(each)} reaches to ${Math.round(box.right)}`);
    const own = [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    const size = parseFloat(getComputedStyle(each).fontSize);
    if (own && size < small[0]) small = [size, name(each)];
  }
  const full = document.querySelector(".reveal").clientHeight === innerHeight;  // else all is clipped away
  const blank = !full || slide.innerText.trim().length < 3 && !slide.querySelector("img");
  return {found: found.slice(0, 3), small, blank};
}"""
# The contrast of letters with the ground that they stand on (WCAG 2), the worst on the slide.
CONTRAST = """() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => { const [r, g, b] = numbers(colour).map(c => (c /= 255) <= 0.03928 ? c / 12.92
    : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = each => { for (; each; each = each.parentElement) { const c = getComputedStyle(each).backgroundColor;
    const n = numbers(c); if (n.length < 4 || n[3] > 0.5) return c; } return "rgb(255,255,255)"; };
  let worst = [99, ""];
  for (const each of Reveal.getCurrentSlide().querySelectorAll("*")) {
    if (each.closest("aside.notes")) continue;
    if (![...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    const [a, b] = [light(getComputedStyle(each).color), light(ground(each))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, each.textContent.trim().slice(0, 40)];
  }
  return worst;
}"""


@pytest.fixture(scope="module")
def decks(tmp_path_factory):
    """All decks, made by the command as a teacher gives it."""
    folder = tmp_path_factory.mktemp("slides")
    command = [str(ROOT / ".venv" / "bin" / "failurelab"), "slides", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def seen(pictures):
    """An empty folder for pictures of slides."""
    shutil.rmtree(pictures / "slides", ignore_errors=True)
    (pictures / "slides").mkdir()
    return pictures / "slides"


@contextlib.contextmanager
def opened(chromium, path):
    """Open a deck from the disk, without a network; its requests and complaints are noted."""
    context = chromium.new_context(viewport={"width": WIDE, "height": HIGH}, color_scheme="light", offline=True)
    page = context.new_page()
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: message.type in ("error", "warning") and said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_function("window.Reveal?.isReady()")
    yield page, asked, said
    context.close()


def walk(page):
    """Show every slide whole, one after the other; give its place."""
    places = page.evaluate("Reveal.getSlides().map(each => Reveal.getIndices(each)).map(({h, v}) => [h, v ?? 0])")
    for h, v in places:
        page.evaluate(
            "([h, v]) => { Reveal.slide(h, v); document.querySelectorAll('.present .fragment')"
            ".forEach(each => each.classList.add('visible')); }",
            [h, v],
        )
        yield h, v


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_slide_can_be_read(chromium, decks, seen, name):
    """Nothing reaches beyond the page sideways, letters are large enough and stand out, no request leaves the file."""
    path = decks / f"{name}.html"
    wrong, count = [], 0
    with opened(chromium, path) as (page, asked, said):
        for h, v in walk(page):
            look = page.evaluate(LOOK, WIDE)
            place = f"{name} {h}/{v}"
            wrong += [f"{place}: {each}" for each in look["found"]]
            if look["blank"]:
                wrong.append(f"{place}: nothing on it")
            if look["small"][0] < SMALLEST:
                wrong.append(f"{place}: letters of {look['small'][0]:.0f} pixels: {look['small'][1]}")
            ratio, text = page.evaluate(CONTRAST)
            if ratio < 4.5:
                wrong.append(f"{place}: contrast {ratio:.1f}: {text!r}")
            page.screenshot(path=seen / f"{name[:2]}-{h:02}-{v:02}.png")
            count += 1
    assert not wrong, "\n".join(wrong)
    assert count > 10
    assert not said
    assert [url for url in asked if not url.startswith(("data:", "blob:")) and url != path.as_uri()] == []


def test_an_answer_comes_at_a_click_and_the_speaker_has_notes(chromium, decks):
    """The first answer of notebook 01 is hidden until the next key; T is for a dark room; S shows the notes."""
    with opened(chromium, decks / "01_requires_grad_warning.html") as (page, _, said):
        answer = page.locator(".fragment").first
        h, v = answer.evaluate("each => { const i = Reveal.getIndices(each.closest('section')); return [i.h, i.v]; }")
        page.evaluate("([h, v]) => Reveal.slide(h, v, -1)", [h, v])
        assert not answer.evaluate("each => each.classList.contains('visible')")
        page.keyboard.press("Space")
        assert answer.evaluate("each => each.classList.contains('visible')")
        ground = "getComputedStyle(document.documentElement).filter"
        assert page.evaluate(ground) == "none"
        page.keyboard.press("t")
        assert page.evaluate(ground).startswith("invert")
        page.keyboard.press("End")
        with page.expect_popup() as popup:
            page.keyboard.press("s")
        popup.value.wait_for_selector(".speaker-controls-notes .value", state="attached")
        popup.value.wait_for_function("document.querySelector('.speaker-controls-notes .value').innerText.length > 20")
        assert not said


if not os.path.isdir(ROOT / ".venv"):
    pytest.exit("NOT RUN: .venv is not there. Next: make setup", returncode=3)
