"""What the verbs that train have in common: flags, the words at the end, and the exit code."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import psutil

from flatout.cli.parser import Parser

if TYPE_CHECKING:
    from flatout.agent import Agent


def add_output_flags(parser: Parser) -> None:
    """--quiet and --json."""
    parser.add_argument("--quiet", action="store_true", help="show nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the summary as the last line, as JSON")


def learn_and_tell(agent: Agent, args: argparse.Namespace) -> int:
    """Learn to the configured total, print the summary, and return the exit code."""
    agent.began_at = psutil.Process().create_time()  # imports count, for who waits for them
    agent.run(None, None, progress_bar=not args.quiet)
    if not args.quiet:
        print(agent.report())
    if args.json:
        print(json.dumps(agent.summary))
    return 128 + agent.stop_signal if agent.stop_signal is not None else 0
