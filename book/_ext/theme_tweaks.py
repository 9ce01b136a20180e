"""Small repairs to the theme and to extensions: one search box, no script that needs a network, calm references on the
API pages, sections without a title.
"""

from pathlib import Path

from docutils import nodes
from sphinx_codeautolink.extension.block import CodeBlockAnalyser


def on_config(app, config):
    options = dict(config.html_theme_options or {})
    for key in ("navbar_start", "navbar_center", "navbar_end", "navbar_persistent"):
        options[key] = []
    config.html_theme_options = options | {"show_toc_level": 2}


def drop_thebe(app, pagename, templatename, context, doctree):
    def wanted(file):
        text = str(getattr(file, "filename", "") or "") + str(getattr(file, "attributes", {}).get("body", ""))
        return "thebe" not in text.lower()

    context["script_files"] = [file for file in context.get("script_files", []) if wanted(file)]


def plain_if_unknown(app, env, node, contnode):
    """On an API page a type that has no entry of its own stays plain text; in prose it remains an error."""
    return contnode if node.get("refdoc", "").startswith("book/api/") else None


def skip_aliases(app, what, name, obj, skip, options):
    """The fields of a named tuple are in its docstring; Python's own words about them say nothing."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def name_toggles(app, error):
    """The arrows that open a branch of the contents get a name for screen readers."""
    if error or app.builder.format != "html":
        return
    bare = '<summary><span class="toctree-toggle"'
    for path in Path(app.outdir).rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        if bare in text:
            named = bare.replace("<summary>", '<summary aria-label="show the pages below">')
            path.write_text(text.replace(bare, named), encoding="utf-8")


def depart_section(self, node):
    """Exercises and solutions are sections without a title, and must not take another section's from the stack."""
    if any(isinstance(child, nodes.title) for child in node.children):
        self.title_stack.pop()


def setup(app):
    CodeBlockAnalyser.depart_section = depart_section
    app.connect("config-inited", on_config, priority=100)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("autodoc-skip-member", skip_aliases)
    app.connect("build-finished", name_toggles)
    app.connect("missing-reference", plain_if_unknown, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
