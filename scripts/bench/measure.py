"""Runs of a memory report, each configuration once."""

import sys
import time
from dataclasses import replace
from typing import Any

from bench.account import Case, Growth, Line, Measured, Prediction
from bench.activations import Activations
from bench.launch import measure_activations, run_system
from bench.predict import predict
from bench.workload import Dtype, Workload

_REFERENCE: dict[str, Any] = {"transport": "shared", "stage": 3, "layers": 8, "width": 1}
_GROWN: dict[str, Any] = {"transport": "shared", "stage": 3, "width": 1, "recomputed": True}
FEW_LAYERS, MANY_LAYERS = 8, 32
_MEBIBYTE = 1 << 20


class Measurements:
    """Predicts and measures; whatever it is asked for again it remembers. Everything raises RunError where a run fails."""

    def __init__(self, base: Workload) -> None:
        self._base = base
        self._measured: dict[Case, Measured] = {}
        self._predicted: dict[Case, Prediction] = {}
        self._activations: dict[Workload, Activations] = {}

    def line(self, case: Case) -> Line:
        """One configuration."""
        constant = self.constant(case.dtype)
        return Line(case=case, predicted=self.predicted(case), measured=self.measured(case), constant=constant)

    def growth(self, dtype: Dtype) -> Growth:
        """The same with few and with many layers."""
        cases = [Case(dtype=dtype, layers=layers, **_GROWN) for layers in (FEW_LAYERS, MANY_LAYERS)]
        few, many = (Line(case=case, predicted=self.predicted(case), measured=self.measured(case), constant=0) for case in cases)
        return Growth(few=few, many=many)

    def constant(self, dtype: Dtype) -> int:
        """Bytes that are neither states nor activations."""
        case = Case(dtype=dtype, **_REFERENCE)
        return self.measured(case).peak - self.predicted(case).total

    def measured(self, case: Case) -> Measured:
        """Train in fresh processes; what the rank came to that needed most."""
        if case not in self._measured:
            began = time.perf_counter()
            run = run_system(f"zeromesh-{case.stage}", self._workload(case))
            rank = max(run.ranks, key=lambda rank: int(rank["peak_bytes"]))
            ledger = rank["notes"]
            found = Measured(ledger=ledger["ledger"], ledger_peak=ledger["ledger_peak"], peak=rank["peak_bytes"])
            self._measured[case] = found
            _tell(f"{case}: {found.peak / _MEBIBYTE:.0f} MiB", began)
        return self._measured[case]

    def predicted(self, case: Case) -> Prediction:
        """Compute, after the case's activations have been measured alone."""
        if case not in self._predicted:
            workload = self._workload(case)
            self._predicted[case] = predict(workload, case.stage, self._activations_of(workload).peak)
        return self._predicted[case]

    def _activations_of(self, workload: Workload) -> Activations:
        alone = replace(workload, transport="auto")
        if alone not in self._activations:
            began = time.perf_counter()
            self._activations[alone] = measure_activations(alone)
            peak, saved = self._activations[alone].peak, self._activations[alone].saved
            _tell(f"activations: {peak / _MEBIBYTE:.0f} MiB, {saved / _MEBIBYTE:.0f} MiB saved for backward", began)
        return self._activations[alone]

    def _workload(self, case: Case) -> Workload:
        same = replace(self._base, dtype=case.dtype, layers=case.layers, transport=case.transport, checkpointing=case.recomputed)
        return same.wider(case.width)


def _tell(what: str, began: float) -> None:
    print(f"{what} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
