"""Twenty prompts of many kinds, and a long text for perplexity.

The long ones come with Python: its help topics (English prose, dense with terms) and the source of a module.
"""

from __future__ import annotations

import inspect
import textwrap
from pydoc_data.topics import topics

_MANUAL = "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2_000)

LONG_TEXT = _MANUAL[20_000:60_000]
"""40,000 characters of English prose with code: more than 4,000 tokens for any of our models."""

_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nWhich rivers cross Germany?<|im_end|>\n<|im_start|>assistant\n"
)

PROMPTS: dict[str, str] = {
    "fact": "The capital of France is",
    "chat": _CHAT,
    "chat_turns": _CHAT + "The Rhine, the Elbe and the Danube.<|im_end|>\n<|im_start|>user\nAnd Austria?<|im_end|>\n",
    "story": "Once upon a time, in a village by the sea, there lived an old fisherman who had never learned to swim. One",
    "python": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        return n\n',
    "cpp": "#include <vector>\n\ntemplate <typename T>\nT sum(const std::vector<T>& xs) {\n\tT total{};\n\tfor (auto x : xs)",
    "json": '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "address": {"city": "London", "zip":',
    "sql": "SELECT c.name, COUNT(o.id) AS orders\nFROM customers c LEFT JOIN orders o ON o.customer_id = c.id\nGROUP BY",
    "chinese": "人工智能是计算机科学的一个分支，它试图了解智能的实质，并生产出一种新的能以人类智能相似的方式做出反应的",
    "japanese": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所で",
    "korean": "대한민국의 수도는 서울이며, 한강이 도시를 가로질러 흐른다. 서울의 인구는",
    "arabic": "اللغة العربية هي أكثر اللغات السامية تحدثاً، وإحدى أكثر اللغات انتشاراً في العالم، ويتوزع متحدثوها في",
    "russian": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
    "german": "Die Donaudampfschifffahrtsgesellschaft wurde 1829 gegründet; ihre Schiffe fuhren von Regensburg bis ins Schwarze",
    "emoji": "I ❤️ this 🎉🎉! The family 👨‍👩‍👧‍👦 flew the flag 🏳️‍🌈 and said 👋🏽. Then they",
    "numbers": "3.14159265358979 2718281828 1,000,000 0x7fffffff 1e-9 2026-12-01T03:17:00Z 192.168.0.1 42 + 58 =",
    "spaces": "  leading,   many    spaces\t\ttabs\n\n\n\nnewlines \n \n and a trailing one ",
    "latex": r"\begin{equation} \int_0^\infty e^{-x^2}\,dx = \frac{\sqrt{\pi}}{2} \end{equation} where $x \in \mathbb{R}$ and",
    "window": _MANUAL[100_000:103_500],
    "long": inspect.getsource(textwrap)[:9_000],
}
