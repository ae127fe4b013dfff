"""Rows made by hand for the harness's tests."""

from dataclasses import replace

from benchmarks.records import Job, Machine, Measurement, Row, Sizes

MIB = 2**20
TINY = Sizes(batch=1, sequence=64, hidden=32, width=16, experts=4, top_k=2)
EAGER = Job(
    suite="layer",
    workload="layer",
    peer="eager",
    sizes=TINY,
    dtype="float32",
    device="cpu",
    seed=0,
    steps=2,
)
MEASURED = Measurement(
    step_seconds=(0.3, 0.1, 0.2),
    compile_seconds=7.0,
    cold=True,
    peak_bytes=8 * MIB,
    accumulating_peak_bytes=4 * MIB,
    whole_peak_bytes=12 * MIB,
    value=0.5,
    gradient_norm=2.0,
    gradient_checksum=0.25,
    matmul_flops_per_second=1e11,
    graphs=1,
    series={"time_ms": (0.0, 1.0, 2.0), "live_bytes": (1e6, 8e6, 0.0)},
)
MACHINE = Machine("a processor", 2, 2, "cpu", "3.12", "2.13", "5.23")


def row_of(peer: str, *, peak_mib: float = 8.0, seconds: float = 0.2, **job_fields: object) -> Row:
    """A finished row with this peak and step time; further fields go to the job."""
    job = replace(EAGER, peer=peer, **job_fields)  # type: ignore[arg-type]  # the fields of a Job, by name
    measurement = replace(MEASURED, peak_bytes=int(peak_mib * MIB), step_seconds=(seconds,))
    return Row(job, 0, MACHINE, measurement)
