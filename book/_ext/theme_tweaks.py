"""Small repairs to the theme: one search box, no script that needs a network, calm references on the API page."""


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
    """On the API page a type that has no entry of its own stays plain text; in prose it remains an error."""
    return contnode if node.get("refdoc") == "book/api" else None


def setup(app):
    app.connect("config-inited", on_config, priority=100)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("missing-reference", plain_if_unknown, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
