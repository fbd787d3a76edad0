"""Measuring: fixed workloads, what the machine allows at best, and other engines beside ours."""
