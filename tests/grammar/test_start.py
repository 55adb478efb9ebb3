"""Start-up: the parser does not pay for lark, and a small file is parsed at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.clock import slowness

CODE = """
import sys, time
begin = time.process_time()
from titan.grammar.parser import parse
parse(open(sys.argv[1]).read(), "x")
print(time.process_time() - begin)
assert "lark" not in sys.modules and "difflib" not in sys.modules
"""


def test_import_and_first_parse_in_80_ms_without_lark(tmp_path: Path) -> None:
    spec = tmp_path / "spec.titan"
    spec.write_text("train {\n" + '    sequence = 8Ki, data = tokens("x")\n' * 38 + "}\n")
    runs = [
        subprocess.run([sys.executable, "-c", CODE, str(spec)], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) < 0.080 * slowness()
