"""Layout of a job in the config that loggers write of a run, which runs are compared by."""

from __future__ import annotations

from merak.record.run import JobRecord

PREFIX = "layout/"
"""Of every key, apart from those of the arguments and of the model's config."""


def logged_layout(job: JobRecord) -> dict[str, int | str]:
    """Layout of a job by key: degrees, schedule, stages, parameters, devices, a microbatch.

    Args:
        job: as it was laid out.
    """
    values: dict[str, int | str] = {
        **job.degrees,
        "ranks": job.num_ranks,
        "hosts": len(set(job.hosts)) or 1,
        "device": job.device,
        "schedule": job.schedule.name,
        "stages": len(job.stages),
        "segments_per_stage": ", ".join(str(len(own)) for own in job.stages),
        "parameters": job.parameters,
        "microbatch": " × ".join(map(str, job.microbatch)),
    }
    return {PREFIX + name: value for name, value in values.items()}
