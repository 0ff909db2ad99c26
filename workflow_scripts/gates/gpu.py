"""Gate `gpu`: a packaged set of bundles repeats the oracle's answers on a GPU, and Metal's compiler takes its kernels.

Only a Mac can do either. A part that this host cannot run makes the gate `not_run`, with the reason; what it can run
is run all the same, so a source that a compiler rejects fails the gate everywhere.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from workflow_scripts.coreai import xcrun
from workflow_scripts.coreai.gpu import why_no_gpu
from workflow_scripts.gates.kernel_source import our_sources, text_line
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.tokens import dialogues_of, gate_dialogue
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.msl.calls import KernelCall
from workflow_scripts.msl.extract import extract

Follow = Callable[[dict[str, list[int]]], Mapping[str, np.ndarray]]
"""Dialogue -> ids to feed; gives what the set puts after each of them, on the GPU."""


def gate_sources(verdict: Verdict, bundles: Sequence[Path]) -> None:
    """Compile every distinct kernel source of the bundles."""
    if not xcrun.has_xcrun():
        verdict.not_run("the kernels are not compiled: this host has no xcrun (it comes with Xcode)")
        return
    calls = {call.source: call for bundle in bundles for call in extract(bundle)}
    try:
        for source, call in calls.items():
            problem = xcrun.compile_metal(source, call.name).problem
            found = "compiles" if problem is None else _in_our_lines(problem, call)
            verdict.check(f"Metal compiler: {call.name}", problem is None, "compiles", found)
    except xcrun.ToolMissing as missing:
        verdict.not_run(f"the kernels are not compiled: {missing}")


def gate_answers(verdict: Verdict, oracle: Oracle, follow: Follow) -> None:
    """The oracle's dialogues of fewer than 256 positions, id by id."""
    reason = why_no_gpu()
    if reason:
        verdict.not_run(f"nothing ran on a GPU: {reason}")
        return
    dialogues = dialogues_of(verdict, oracle, long_run=False)
    chosen = follow({dialogue.name: dialogue.fed_ids for dialogue in dialogues})
    for dialogue in dialogues:
        gate_dialogue(verdict, dialogue, chosen[dialogue.name])


def _in_our_lines(problem: str, call: KernelCall) -> str:
    """A compiler's message with its lines counted as in the kernel's own file, where the bundle holds that text."""
    ours = next(((kernel, text) for kernel, text in our_sources().items() if text in call.source), None)
    if ours is None:
        return problem
    kernel, before = ours[0], text_line(call, ours[1])
    place = re.compile(rf"\b{re.escape(call.name)}\.metal:(\d+)")
    return place.sub(lambda found: f"{kernel}.metal:{int(found[1]) - before}", problem)
