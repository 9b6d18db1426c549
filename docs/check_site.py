#!/usr/bin/env python3
"""Open the built site in a real browser, and say what a reader would stumble over.

    make site-test

Every page is opened wide, on a narrow screen and without JavaScript, and some in the dark theme. Looked for are links
that lead nowhere, errors in the console, anything that is fetched from elsewhere, sideways scrolling, pictures without
an alt text, and pages that are empty without JavaScript. Then each literal symptom of the registry is typed into the
search, and looked up in the index. Screenshots are kept in .site/screenshots, to be looked at.

Exit status: 0 all held, 1 something did not, 3 NOT RUN (no browser, or no site).
"""

import functools
import html.parser
import http.server
import os
import pathlib
import shutil
import sys
import threading
import urllib.parse

import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
SITE = ROOT / ".site" / "html"
SHOTS = ROOT / ".site" / "screenshots"
REGISTRY = ROOT / "helpers" / "failurelab" / "registry"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
# Kept as screenshots: one page of each kind.
SHOWN = (
    "index.html",
    "path.html",
    "symptoms.html",
    "measured.html",
    "glossary.html",
    "notebooks.html",
    "notebooks/02_garbage_rollouts.html",
    "notebooks/07_four_bit_devices.html",
    "labs/index.html",
    "labs/01_frozen_embeddings.html",
)
# What reaches beyond the screen, and is in no box that scrolls by itself. The theme clips such things, so that the
# width of the page does not tell of them.
TOO_WIDE = """width => {
  const boxed = element => {
    for (let each = element.parentElement; each && each.tagName !== "ARTICLE"; each = each.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(each).overflowX)) return true;
    return false;
  };
  const found = [...document.querySelectorAll("article *")].filter(
    each => each.getBoundingClientRect().right > width + 1 && !boxed(each));
  const wide = found.slice(0, 3).map(each =>
    `<${each.tagName.toLowerCase()}> reaches to ${Math.round(each.getBoundingClientRect().right)} of ${width} pixels`);
  const all = document.documentElement.scrollWidth;
  return all > width ? [...wide, `the page is ${all} pixels wide, the screen ${width}`] : wide;
}"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Page(html.parser.HTMLParser):
    """What a page links to, the anchors that it has, and its pictures without an alt text."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.anchors, self.mute = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        """Collect from one element."""
        named = dict(attributes)
        self.anchors |= {named[key] for key in ("id", "name") if named.get(key)}
        self.links += [named[key] for key in ("href", "src") if named.get(key)]
        if tag == "img" and not (named.get("alt") or "").strip():
            self.mute.append(named.get("src"))


def links() -> tuple[list[str], list[str]]:
    """Return the links that lead nowhere, and the pictures without an alt text. Other hosts are not asked."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(SITE.rglob("*.html"))}
    broken, mute = [], []
    for path, page in pages.items():
        here = path.relative_to(SITE)
        mute += [f"{here}: {src}" for src in page.mute]
        for link in dict.fromkeys(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme in ("https", "data", "mailto"):
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            if parts.scheme or not target.is_file():
                broken.append(f"{here}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{here}: {link} (no such place on that page)")
    return broken, mute


def symptoms() -> dict[str, str]:
    """Return each literal text of the registry, and the notebook that explains it."""
    told = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(REGISTRY.glob("F*.toml"))]
    return {text: failure["notebook"] for failure in told for text in failure.get("symptoms", [])}


class Visit:
    """A browser on the site, and what went wrong in it."""

    def __init__(self, browser, address: str):
        self.browser, self.address, self.wrong = browser, address, []

    def context(self, **options):
        """Return a page of a new context whose errors and foreign requests are noted."""
        page = self.browser.new_context(**options).new_page()
        page.on("console", lambda said: said.type in ("error", "warning") and self.note(page, f"console: {said.text}"))
        page.on("pageerror", lambda error: self.note(page, f"script: {error}"))
        page.on("requestfailed", lambda asked: self._failed(page, asked))
        page.on("request", lambda asked: self._own(page, asked.url))
        return page

    def note(self, page, what: str) -> None:
        """Keep one thing that went wrong."""
        self.wrong.append(f"{page.url.removeprefix(self.address)}: {what}")

    def _failed(self, page, asked) -> None:
        if asked.failure != "net::ERR_ABORTED":  # broken off by going on to the next page
            self.note(page, f"not loaded: {asked.url}")

    def _own(self, page, url: str) -> None:
        if not url.startswith((self.address, "data:", "blob:")):
            self.note(page, f"fetched from elsewhere: {url}")

    def pages(self, names: list[str]) -> dict[str, list[str]]:
        """Open every page in each way; return what was found, by the name of the check."""
        sideways, empty = [], []
        wide = self.context(viewport=WIDE)
        dark = self.context(viewport=WIDE, color_scheme="dark")
        narrow = self.context(viewport=NARROW, device_scale_factor=2, is_mobile=True, has_touch=True)
        bare = self.context(viewport=WIDE, java_script_enabled=False)
        for name in names:
            wide.goto(self.address + name)
            read = wide.locator("article").inner_text()
            self._shoot(wide, "wide", name)
            narrow.goto(self.address + name)
            sideways += [f"{name}: {each}" for each in narrow.evaluate(TOO_WIDE, NARROW["width"])]
            self._shoot(narrow, "narrow", name)
            bare.goto(self.address + name)
            if name != "search.html":
                without = bare.locator("article").inner_text()
                if not bare.locator("article h1").is_visible() or len(without) < 0.98 * len(read):
                    empty.append(f"{name}: {len(without)} characters of {len(read)}")
            if name in SHOWN:
                dark.goto(self.address + name)
                self._shoot(dark, "dark", name)
        bare.goto(self.address + "index.html")
        self._shoot(bare, "no-script", "index.html")
        if not bare.locator(".sidebar-tree a").first.is_visible():
            empty.append("index.html: the table of contents is not visible")
        return {"a narrow screen does not scroll sideways": sideways, "readable without JavaScript": empty}

    def search(self, wanted: dict[str, str]) -> list[str]:
        """Type each literal text into the search; return those that do not find the index and their notebook."""
        from playwright.sync_api import TimeoutError

        lost = []
        page = self.context(viewport=WIDE)
        for text, notebook in wanted.items():
            page.goto(self.address + "index.html")
            box = page.locator("input[name=q]").first
            box.fill(text)
            box.press("Enter")
            page.wait_for_url("**/search.html*")
            try:
                page.wait_for_function(
                    "document.querySelector('.search-summary')?.textContent.match(/found|did not match/)"
                )
            except TimeoutError:
                return [*lost, f"{text!r}: the search gave no answer in 30 s"]
            # Each page that was found is fetched for its summary: leaving before would break that off.
            page.wait_for_load_state("networkidle")
            found = page.eval_on_selector_all("#search-results li a", "all => all.map(each => each.href)")
            pages = [urllib.parse.urlsplit(each).path.lstrip("/") for each in found]
            missing = [each for each in ("symptoms.html", f"notebooks/{notebook}.html") if each not in pages]
            if missing:
                lost.append(f"{text!r} does not find {' nor '.join(missing)}; it finds {len(pages)} pages")
        page.screenshot(path=SHOTS / "search.png")
        return lost

    def index(self, wanted: dict[str, str]) -> list[str]:
        """Look each literal text up in the index, without JavaScript, and follow its link to the notebook's."""
        page = self.context(viewport=WIDE, java_script_enabled=False)
        page.goto(self.address + "symptoms.html")
        lines = page.locator("article li").evaluate_all(
            "all => all.map(each => [each.querySelector('code')?.textContent ?? '', "
            "each.querySelector('a.reference')?.getAttribute('href') ?? ''])"
        )
        lost = []
        for text, notebook in wanted.items():
            anchors = [link for literal, link in lines if " ".join(literal.split()) == " ".join(text.split())]
            sections = [
                page.locator(f"section{link}, section:has(> span{link})").last for link in anchors if link[:1] == "#"
            ]
            leads = any(each.locator(f"a[href='notebooks/{notebook}.html']").count() for each in sections)
            if not leads:
                lost.append(f"{text!r}: {'its entry does not lead to ' + notebook if anchors else 'no entry'}")
        return lost

    def _shoot(self, page, way: str, name: str) -> None:
        if name in SHOWN:
            page.screenshot(path=SHOTS / f"{way}-{name.replace('/', '-').removesuffix('.html')}.png", full_page=True)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Keep the server's log out of the report."""


def browser_path() -> str | None:
    """Return the system's browser: $CHROMIUM, or what is on the path."""
    asked = os.environ.get("CHROMIUM")
    return shutil.which(asked) if asked else next((path for name in BROWSERS if (path := shutil.which(name))), None)


def main() -> int:
    """Run all checks and print them; return the exit status."""
    program = browser_path()
    if program is None:
        print("NOT RUN: no chromium or chrome was found. Next: install Debian's package chromium, or set CHROMIUM")
        return 3
    if not (SITE / "index.html").exists():
        print("NOT RUN: .site/html is not there. Next: make site")
        return 3
    from playwright.sync_api import sync_playwright

    shutil.rmtree(SHOTS, ignore_errors=True)
    SHOTS.mkdir(parents=True)
    broken, mute = links()
    found = {"links lead somewhere": broken, "pictures have an alt text": mute}
    names = [str(path.relative_to(SITE)) for path in sorted(SITE.rglob("*.html"))]
    wanted = symptoms()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
            visit = Visit(browser, f"http://127.0.0.1:{server.server_port}/")
            found |= visit.pages(names)
            found["each literal symptom is found by the search"] = visit.search(wanted)
            found["each literal symptom is in the index, with its notebook"] = visit.index(wanted)
            found["no error in the console, nothing fetched from elsewhere"] = sorted(set(visit.wrong))
            browser.close()
    finally:
        server.shutdown()
    for check, wrong in found.items():
        print(f"{'FAIL' if wrong else 'PASS'}  {check}")
        for line in wrong[:20]:
            print(f"      {line}")
    print(f"{len(names)} pages, {len(wanted)} literal symptoms; screenshots are in {SHOTS.relative_to(ROOT)}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
