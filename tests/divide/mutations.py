"""Shows which conditions of the rules no test proves: takes them out, one at a time.

    python -m tests.divide.mutations                     all modules
    python -m tests.divide.mutations arithmetic 40 41    these conditions of one module

A condition is one under which a rule says no, or a part of one under which it says yes. Each is
taken out in a forked process, which runs the cases whose analysis calls the changed function. A
condition that is listed at the end changes no case: it is needless, or a case lacks.
"""

import ast
import importlib
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras  # noqa: E402, F401  (before the first fork: its import takes seconds)

MODULES = (
    "arithmetic", "shapes", "layers", "indices", "rule", "lists", "loops", "tables", "composites",
    "analysis", "as_rows",
)  # fmt: skip
TESTS = ("arithmetic", "shapes", "layers", "indices", "loops", "tables", "composites")
FOLDER = Path(__file__).parents[2] / "towers" / "divide"
SECONDS = 180  # for the cases of one changed function; a loop that never ends is a difference
AT_ONCE = 12  # cases in one trace
Change = tuple[
    ast.AST, str, Any
]  # a node, the name of its field, and the field without the condition


def _says_no(branch: Any) -> bool:
    """Returns whether a branch returns None, or raises as a rule does to say no."""
    if not isinstance(branch, list):
        return isinstance(branch, ast.Constant) and branch.value is None
    last = branch[-1]
    if isinstance(last, ast.Return):
        return last.value is None or _says_no(last.value)
    return isinstance(last, ast.Raise)


def changes(tree: ast.AST) -> Iterator[Change]:
    """Yields each condition of a module that can be taken out."""
    no_tests = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) or isinstance(node, ast.IfExp) and (
            _says_no(node.body) or _says_no(node.orelse)
        ):  # fmt: skip
            yield node, "test", ast.Constant(not _says_no(node.body))
            if _says_no(node.body):
                no_tests.add(node.test)
        if isinstance(node, ast.BoolOp):
            operator = ast.Or if node in no_tests else ast.And
            if isinstance(node.op, operator):
                for part in node.values:
                    rest = [other for other in node.values if other is not part]
                    yield node, "values", rest if len(rest) > 1 else 2 * rest


def changed(name: str, index: int) -> tuple[ast.Module, list[str], str]:
    """Returns a module without one condition, the functions around it, and what was changed."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    node, field, value = list(changes(tree))[index]
    before = ast.unparse(getattr(node, field) if field == "test" else node)
    around = (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and node in ast.walk(f))
    names = [f.name for f in sorted(around, key=lambda f: f.lineno)]
    setattr(node, field, value)
    after = ast.unparse(value if field == "test" else node)
    what = f"{name}.py:{node.lineno} {names[0]}: {before}  ->  {after}"
    return ast.fix_missing_locations(tree), names, what


class Changed(importlib.machinery.SourceFileLoader):
    """Imports one module of the rules with changed source."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        super().__init__(f"towers.divide.{name}", str(FOLDER / f"{name}.py"))
        self._tree = tree

    def get_code(self, fullname: str) -> Any:
        return compile(self._tree, self.path, "exec")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname == self.name:
            return importlib.util.spec_from_file_location(fullname, self.path, loader=self)
        return None


def cases() -> list[Any]:
    """Returns the cases of all tests of rules, which import the rules."""
    modules = (importlib.import_module(f"tests.divide.{name}_test") for name in TESTS)
    return [case for module in modules for case in module.CASES]


def calls(send: Any) -> None:
    """Sends, for each function of the rules, the indices of the cases that call it."""
    found = defaultdict(set)
    every = cases()
    from tests.divide.whole_and_divided import traced_and_divided

    for k, case in enumerate(every):

        def note(frame: Any, event: str, _: Any, k: int = k) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(str(FOLDER)):
                found[Path(code.co_filename).stem, code.co_name].add(k)

        sys.setprofile(note)
        traced_and_divided([case])
        sys.setprofile(None)
    send.send(dict(found))


def is_noticed(send: Any, name: str, tree: ast.Module, indices: list[int]) -> None:
    """Sends the error of the first cases that differ with a changed module, or None."""
    for module in [m for m in sys.modules if m.startswith(("towers.divide", "tests.divide."))]:
        del sys.modules[module]
    sys.meta_path.insert(0, Changed(name, tree))
    try:
        every = cases()
        from tests.divide.whole_and_divided import assert_alike

        for i in range(0, len(indices), AT_ONCE):
            assert_alike([every[k] for k in indices[i : i + AT_ONCE]])
    except BaseException as error:
        send.send(f"{type(error).__name__}: {str(error)[:150]}")
    else:
        send.send(None)


def in_fork(seconds: float, function: Any, *arguments: Any) -> Any:
    """Returns what a function sends from a forked process within some seconds."""
    receive, send = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=function, args=(send, *arguments))
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(seconds) else "no end"
    except EOFError:
        return "died"
    finally:
        process.kill()
        process.join()


def main(names: list[str], indices: list[int]) -> None:
    """Prints what notices each change, and at the end those that nothing notices."""
    found = in_fork(10 * SECONDS, calls)
    missed, total = [], 0
    for name in names:
        tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
        for index in indices or range(len(list(changes(tree)))):
            new_tree, functions, what = changed(name, index)
            using = sorted(set().union(*(found.get((name, f), ()) for f in functions)))
            noticed = in_fork(SECONDS, is_noticed, name, new_tree, using)
            print(f"{name} {index}: {what}\n    {noticed}", flush=True)
            total += 1
            if noticed is None:
                missed.append(f"{name} {index}: {what}")
    print(f"{total - len(missed)} of {total} are noticed. Not noticed:", *missed, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:2] or list(MODULES), [int(index) for index in sys.argv[2:]])
