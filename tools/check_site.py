#!/usr/bin/env python3
"""Open the built site in a real browser, and say what a reader would stumble over: make site-test

Every page is opened wide, on a narrow screen and without JavaScript. Looked for are errors in the console, anything
that is fetched from elsewhere, sideways scrolling, pictures without an alt text, and pages that are empty without
JavaScript. Sphinx checks the links.

Exit status: 0 all held, 1 something did not, 3 NOT RUN (no browser, or no site).
"""

import functools
import http.server
import os
import pathlib
import shutil
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parents[1]
SITE = ROOT / ".site" / "html"
SHOTS = ROOT / ".site" / "screenshots"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
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
MUTE = "[...document.querySelectorAll('article img')].filter(each => !each.alt.trim()).map(each => each.src)"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Visit:
    """A browser on the site, and what went `wrong` in it, by the name of the check."""

    def __init__(self, browser, address: str):
        self.browser, self.address = browser, address
        self.wrong: dict[str, list[str]] = {}

    def note(self, check: str, problems: list[str]) -> None:
        """Keep what a check found; nothing is found where all is well."""
        self.wrong.setdefault(check, []).extend(problems)

    def open(self, **options):
        """Return a page of a new context whose errors and foreign requests are noted."""
        check = "no error in the console, nothing fetched from elsewhere"
        page = self.browser.new_context(**options).new_page()
        page.on("console", lambda said: said.type in ("error", "warning") and self.note(check, [said.text]))
        page.on("pageerror", lambda error: self.note(check, [str(error)]))
        own = (self.address, "data:", "blob:")
        page.on("request", lambda asked: asked.url.startswith(own) or self.note(check, [asked.url]))
        self.note(check, [])
        return page

    def look(self, names: list[str]) -> None:
        """Open every page wide, narrow and without JavaScript."""
        wide, bare = self.open(viewport=WIDE), self.open(viewport=WIDE, java_script_enabled=False)
        narrow = self.open(viewport=NARROW, device_scale_factor=2, is_mobile=True, has_touch=True)
        for name in names:
            for page in (wide, narrow, bare):
                page.goto(self.address + name)
            shot = SHOTS / f"{name.replace('/', '-').removesuffix('.html')}.png"
            wide.screenshot(path=shot)
            self.note("pictures have an alt text", [f"{name}: {problem}" for problem in wide.evaluate(MUTE)])
            sideways = narrow.evaluate(TOO_WIDE, NARROW["width"])
            self.note("a narrow screen does not scroll sideways", [f"{name}: {problem}" for problem in sideways])
            read, without = (len(page.locator("article").inner_text()) for page in (wide, bare))
            empty = name != "search.html" and without < 0.98 * read
            self.note("readable without JavaScript", [f"{name}: {without} characters of {read}"] if empty else [])


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
    names = [str(path.relative_to(SITE)) for path in sorted(SITE.rglob("*.html"))]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
            visit = Visit(browser, f"http://127.0.0.1:{server.server_port}/")
            visit.look(names)
            browser.close()
    finally:
        server.shutdown()
    for check, wrong in visit.wrong.items():
        print("\n      ".join([f"{'FAIL' if wrong else 'PASS'}  {check}", *wrong[:20]]))
    print(f"{len(names)} pages; screenshots are in .site/screenshots")
    return 1 if any(visit.wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
