"""Measuring a pair: prompt sets, metrics, runner."""
