"""Ports made real: Kafka, Redis, and the embedded ones that pass the same contract suites."""
