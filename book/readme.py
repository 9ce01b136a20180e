"""Bring README.md up to date: the output of its example, and the picture. A test fails when they are not.

Run as `python book/readme.py`.
"""

import contextlib
import io
import re
from pathlib import Path

from minisgl import LLM, SamplingParams
from minisgl.figures.drawing import Drawing
from minisgl.figures.example import REQUESTS
from minisgl.figures.timeline import timeline

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<output>.*?)```", re.DOTALL)


def picture() -> Drawing:
    """The timeline of chapter 1, from a run of its own."""
    options = {"page_size": 16, "num_pages": 256, "max_num_batched_tokens": 128, "chunk_size": 64}
    with LLM("tiny", device="cpu", overlap=False, trace=True, **options) as llm:
        outputs = llm.chat(list(REQUESTS.values()), SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
        return timeline(llm.engine.trace, {o.request_id: name for name, o in zip(REQUESTS, outputs, strict=True)})


def example(text: str) -> tuple[str, str]:
    """README with what its example prints now, and what is printed."""
    code = EXAMPLE.search(text)["code"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    output = printed.getvalue()
    return EXAMPLE.sub(lambda match: f"```python\n{code}```\n\n```text\n{output}```", text), output


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(example(readme.read_text(encoding="utf-8"))[0], encoding="utf-8")
    picture().save(ROOT / "book/_static/timeline.svg")
