"""Sphinx's settings for the course's site. `make site` builds it from the pages that tools/site_pages.py lays out."""

from pygments.lexer import bygroups, inherit, using
from pygments.lexers.python import PythonLexer
from pygments.lexers.shell import BashLexer
from pygments.token import Comment

project = "GRPO Failure Lab"
author = "The GRPO Failure Lab developers"
copyright = "the GRPO Failure Lab developers, Apache-2.0"
html_title = project
language = "en"

extensions = ["myst_nb", "sphinx.ext.githubpages"]
# Stored outputs are shown as they are: a page never runs a notebook, and so never disagrees with the committed one.
nb_execution_mode = "off"
# What a cell wrote to stdout and stderr in turns is one log for its reader.
nb_merge_streams = True
# No page uses widgets; without this, scripts would be fetched from elsewhere.
nb_ipywidgets_js = {}
nb_mime_priority_overrides = [("html", "text/html", 0)]
myst_heading_anchors = 3
# Error texts are quoted in prose too, and are searched for as they were printed.
smartquotes = False
# "F1 ..." in prose is prose: no other Markdown than that of the notebooks and of GitHub is understood.
myst_enable_extensions = []
myst_links_external_new_tab = False
suppress_warnings = [
    # Notebooks skip a level of headings where a short one reads better.
    "myst.header",
]

# A block without a language is a command or a log, and no Python.
highlight_language = "none"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"priority": 100})]
html_favicon = "_static/favicon.svg"
html_use_index = False
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"


class CellLexer(PythonLexer):
    """Python with the magics of a notebook's cell; what follows %%era is Python as well, or a shell's after %%bash."""

    name = "cell"
    tokens = {  # noqa: RUF012
        "root": [
            (r"^(%%bash.*\n)((?:.|\n)*)", bygroups(Comment.Preproc, using(BashLexer))),
            (r"^[%!].*\n", Comment.Preproc),
            inherit,
        ]
    }


def setup(app):
    """Register the lexer that tools/site_pages.py names in each notebook, and say which pages are Chinese."""
    app.add_lexer("cell", CellLexer)
    app.connect("html-page-context", name_language)


def name_language(app, page, template, context, doctree):
    """Have browsers and readers of screens take a Chinese page for one."""
    if page.startswith("zh/"):
        context["language"] = "zh"
