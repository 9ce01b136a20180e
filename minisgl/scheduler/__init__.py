"""Which requests and which tokens enter the next step.

Chapter 2 tells this room's story. `Scheduler` is the only writer of requests; policies are pure functions. Plain Python
and numpy, no torch: the scheduler decides, the engine acts.
"""

from minisgl.request import FinishedRequest, LogprobColumns, StepOutput
from minisgl.scheduler.plan import AdmittedRow, PromptLogprobs, RowView, SchedulerOutput, StepResult
from minisgl.scheduler.rows import Rows
from minisgl.scheduler.scheduler import Scheduler

__all__ = [
    "AdmittedRow",
    "FinishedRequest",
    "LogprobColumns",
    "PromptLogprobs",
    "RowView",
    "Rows",
    "Scheduler",
    "SchedulerOutput",
    "StepOutput",
    "StepResult",
]
