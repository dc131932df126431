"""theory.json, the figures, and a page that needs nothing but itself."""

import warnings
from importlib import resources
from pathlib import Path

from palsgd.lab.atomic import atomic_write
from palsgd.lab.run_folder import write_json
from palsgd.lab.theory_report.tables import tables
from palsgd.theory.conclusion import conclusion
from palsgd.theory.inequality import FAILS
from palsgd.theory.results import Results

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>palsgd: theory</title>
<style>
{{ css|safe }}
:root {
{% for name, (light, dark) in theme.items() %}
  --{{ name }}: light-dark({{ light }}, {{ dark }});
{% endfor %}
{% for style in line_styles %}
  --line-{{ loop.index0 }}: light-dark({{ style.light }}, {{ style.dark }});
{% endfor %}
}
.wide table { width: 100%; }
.wide td:nth-child(3) { white-space: normal; }
</style>
</head>
<body>
{% macro show(table) %}
<h2>{{ table.title }}</h2>
<div class="table wide"><table aria-label="{{ table.title }}">
<thead><tr>{% for name in table.head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}<{{ "th scope=row" if loop.first else "td" }}>{{ cell }}</{{ "th" if loop.first else "td" }}>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
<main>
<header>
<h1>Theorem 2 beside what PALSGD does</h1>
<dl class="facts">
{% for name, value in facts %}
<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>
{% for reason in outside %}
<p class="note">Outside the theorem: {{ reason }}. Run all the same.</p>
{% endfor %}
<h2>Conclusion</h2>
<ul>
{% for sentence in conclusion %}<li>{{ sentence }}</li>
{% endfor %}
</ul>
</header>
{{ show(errors) }}
{{ show(exponents) }}
{{ show(eta) }}
<h2>Studies</h2>
<div class="panels">
{% for study, plot in studies %}
<figure>
<div class="variant" role="img" aria-label="{{ study.title }}">{{ plot.svg|safe }}</div>
{% for each in study.exponents %}
{% set verdict = each.verdict(family) %}
<figcaption>{{ each.claim }}: claimed {{ each.claimed }}, measured {{ "%.2f ± %.2f"|format(each.measured.mean, verdict.half) }}, {{ verdict }}. {{ each.why }}.</figcaption>
{% endfor %}
{% for note in study.notes %}<figcaption>{{ note }}</figcaption>{% endfor %}
</figure>
{% endfor %}
</div>
{{ show(lemmas) }}
<h2>Where a statement fails, and why</h2>
{% for check in failing %}
<p class="note">{{ check.claim }}, {{ check.form }}, {{ check.where }}: {{ "%.4g > %.4g"|format(check.left, check.right) }}. {{ check.why }}</p>
{% endfor %}
</main>
</body>
</html>
"""  # noqa: E501


def write_results(results: Results, folder: Path) -> Path:
    """theory.json, figures/ and theory.html; the page's path."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    write_json(folder / "theory.json", results.document())
    page = folder / "theory.html"
    atomic_write(page, _html(results, folder / "figures"))
    return page


def _html(results: Results, figures: Path) -> str:
    import jinja2

    from palsgd.lab.report.canvas import drawing_style
    from palsgd.lab.report.styles import THEME
    from palsgd.lab.theory_report.figures import LINE_STYLES, draw

    errors, exponents, eta, lemmas = tables(results)
    shown = [study for study in results.studies if study.lines]
    with drawing_style(), warnings.catch_warnings():
        # A run outside the theorem may diverge; its points are left out.
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        studies = [(study, draw(study, figures)) for study in shown]
    css = (resources.files("palsgd.lab.report") / "report.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_PAGE).render(
        css=css, theme=THEME, line_styles=LINE_STYLES, facts=facts(results),
        outside=results.outside, conclusion=conclusion(results), family=results.family,
        errors=errors, exponents=exponents, eta=eta, lemmas=lemmas, studies=studies,
        failing=[each for each in results.checks if each.verdict(results.family).word == FAILS],
    )  # fmt: skip


def facts(results: Results) -> list[tuple[str, str]]:
    context, s = results.context, results.context.setting
    problem = context.problem
    return [
        ("problem", f"{problem.name}, {problem.dim} dimensions"),
        ("L, mu, sigma", f"{problem.smoothness:g}, {problem.mu:g}, {problem.sigma:.4g}"),
        ("distance at the start", f"{context.distance:g}"),
        ("K, H, p", f"{s.workers}, {s.sync_every}, {s.mix_prob:g}"),
        ("alpha, eta, beta", f"{s.lr:.4g}, {s.mix_rate:.4g}, {s.beta:.4g}"),
        ("steps", f"{s.steps:,}"),
        ("draws", s.draws),
        ("runs", f"{context.runs:,}"),
    ]
