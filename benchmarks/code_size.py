"""Counts lines of product code, without docstrings, comments and blank lines.

    python benchmarks/code_size.py [FOLDER …]

Prints lines and modules per package, the folder with most modules, and class names that are defined more than once.
The folders default to the product's packages in this checkout; a second checkout's packages can be named instead.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines of all strings that stand alone as a statement."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_lines(source: str) -> int:
    """The number of lines on which code stands."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts lines of product code.")
    parser.add_argument("folders", nargs="*", type=Path, help="packages (default: those of this checkout)")
    folders = parser.parse_args().folders or [ROOT / "rlmesh", ROOT / "launcher" / "rlmesh_launcher"]
    lines: collections.Counter[str] = collections.Counter()
    modules: collections.Counter[str] = collections.Counter()
    classes: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder.parent)
            source = path.read_text()
            lines["/".join(inside.parts[: min(2, len(inside.parts) - 1)])] += code_lines(source)
            if path.name != "__init__.py":
                modules[str(inside.parent)] += 1
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(str(inside))
    for package, count in sorted(lines.items()):
        print(f"{count:7,}  {package}")
    print(f"{sum(lines.values()):7,}  lines of code in {sum(modules.values())} modules")
    folder_name, most = modules.most_common(1)[0]
    print(f"largest folder: {folder_name}, {most} modules")
    print(f"class names defined more than once: {', '.join(n for n, f in classes.items() if len(f) > 1) or 'none'}")


if __name__ == "__main__":
    main()
