"""Decides what each step computes, and is the only writer of Request."""

from llmserve.scheduler.scheduler import Scheduler, SchedulerCounts

__all__ = ["Scheduler", "SchedulerCounts"]
