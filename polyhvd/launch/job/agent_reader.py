"""Runs the agent's program, of which so many bytes come first on standard input: ``agent_reader.py BYTES``.

For what starts agents and may or may not pass words through a shell: this command line has nothing in it
that a shell would change. Uses only the standard library, and nothing newer than Python 3.8.
"""

import sys

if __name__ == "__main__":
    source = sys.stdin.buffer.read(int(sys.argv.pop(1)))
    exec(compile(source, "polyhvd-program", "exec"))
