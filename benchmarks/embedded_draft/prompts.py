"""Prompts of our own, from which the embedded target writes the text that its draft is trained on.

    python prompts.py OUTPUT.jsonl --count 100000 [--seed 0]

Four kinds in equal parts: word problems, programming tasks (among them signatures and docstrings of Python's standard
library), ordinary requests (all from the files beside this one), and requests with a follow-up. Nothing is taken from
any evaluation set; two fixed sentences of the paper's evaluation protocol ("Please reason step by step, ...", "Write a
solution to ...") are put around some of our own problems, as its prompts carry them.
"""

import argparse
import ast
import inspect
import json
import pkgutil
import random
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
TOPICS, REQUESTS, FOLLOW_UPS, TASKS, WORD_PROBLEMS = (
    (HERE / f"{name}.txt").read_text().splitlines()
    for name in ("topics", "requests", "follow_ups", "programming", "word_problems")
)
NAMES = ["Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Kate", "Liam", "Mia"]
NAMES += ["Noah", "Olivia", "Pablo", "Quinn", "Rosa", "Sam", "Tara", "Uma", "Victor", "Wendy", "Yusuf", "Zoe", "Marcus"]
THINGS = ["apples", "marbles", "books", "pencils", "stickers", "cookies", "oranges", "balloons", "stamps", "coins"]
THINGS += ["eggs", "flowers", "candles", "toy cars", "cupcakes", "shells", "bottles", "tickets", "postcards", "beads"]
PLACES = ["school", "market", "library", "bakery", "farm", "factory", "office", "museum", "garden", "hotel"]
FORMS = [
    "Write a {l} function to {t}.",
    "Write a {l} program to {t}.",
    "How do I {t} in {l}?",
    "Show me {l} code to {t}.",
]
FORMS += ["Write a {l} function to {t} and explain how it works.", "Here is my task: {t}. Give me a {l} solution."]
FORMS += ["Implement a {l} function that can {t}. Add a test.", "What is the complexity to {t}? Show {l} code."]
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLUTION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```"


def word_problem(rng: random.Random) -> list[str]:
    a, b, n = rng.sample(NAMES, 3)
    k, m = rng.randint(2, 5), rng.randint(3, 12)
    values = {"A": a, "B": b, "C": n, "x": rng.choice(THINGS), "p": rng.choice(PLACES)}
    values |= {"a": rng.randint(20, 240), "b": rng.randint(8, 60), "c": rng.randint(3, 40), "n": rng.randint(2, 12)}
    values |= {"k": k, "m": m, "s": k + m, "q": k * m}
    text = rng.choice(WORD_PROBLEMS).format(**values)
    if rng.random() < 0.15:
        text = rng.choice(("Can you help me with this? ", "Question: ", "Here is a riddle. ")) + text
    return [text + (STEP_BY_STEP if rng.random() < 0.6 else "")]


def library_functions() -> list[str]:
    """Signatures with docstrings of the pure Python modules of the standard library."""
    found = []
    for module in pkgutil.iter_modules():
        if module.name.startswith("_") or module.name in ("antigravity", "this", "idlelib", "turtle", "turtledemo"):
            continue
        spec = module.module_finder.find_spec(module.name)  # type: ignore[call-arg]
        path = Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
        if path is None or "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        found += functions_of(path)
    return sorted(set(found))


def functions_of(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8", errors="replace")
    stubs = []
    for node in ast.walk(ast.parse(source)):
        doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if doc and 40 < len(doc) < 500 and not node.name.startswith("_"):
            arguments = ast.unparse(node.args).replace("self, ", "").replace("self", "")
            body = inspect.cleandoc(doc).replace("\n", "\n    ")
            stubs.append(f'def {node.name}({arguments}):\n    """{body}\n    """\n')
    return stubs


def name_of(task: str, rng: random.Random) -> str:
    words = [w for w in "".join(c if c.isalnum() else " " for c in task).lower().split() if w not in ("the", "a", "of")]
    return "_".join(words[: rng.randint(2, 4)])


def programming(rng: random.Random, library: list[str]) -> list[str]:
    task, kind = rng.choice(TASKS), rng.random()
    if kind < 0.3:
        return [SOLUTION.format(code=rng.choice(library))]
    if kind < 0.5:
        argument = rng.choice(("n: int", "numbers: list[int]", "text: str", "values", "s: str", "items", "x, y"))
        stub = f'def {name_of(task, rng)}({argument}):\n    """{task[0].upper()}{task[1:]}.\n    """\n'
        return [rng.choice((SOLUTION.format(code=stub), f"Complete this function:\n```python\n{stub}```"))]
    language = rng.choice(("python", "Python", "Python", "JavaScript", "Java", "C++"))
    text = rng.choice(FORMS).format(l=language, t=task)
    return [text.replace(f" {language} ", " ", 1) if rng.random() < 0.2 else text]


def request(rng: random.Random) -> list[str]:
    t, u, v = rng.sample(TOPICS, 3)
    return [rng.choice(REQUESTS).format(t=t, u=u, v=v)]


def conversation(rng: random.Random, library: list[str]) -> list[str]:
    first = rng.choice((request, request, word_problem, lambda r: programming(r, library)))(rng)
    return [*first, rng.choice(FOLLOW_UPS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, library = random.Random(arguments.seed), library_functions()
    kinds: list[Callable[[], list[str]]] = [
        lambda: word_problem(rng), lambda: programming(rng, library), lambda: request(rng),
        lambda: conversation(rng, library),
    ]  # fmt: skip
    prompts = {tuple(kinds[i % len(kinds)]()) for i in range(arguments.count)}
    ordered = sorted(prompts)
    rng.shuffle(ordered)
    with arguments.output.open("w") as file:
        file.writelines(json.dumps({"turns": list(turns)}) + "\n" for turns in ordered)
    print(f"{len(ordered)} different prompts, {len(library)} library functions")


if __name__ == "__main__":
    main()
