"""The benchmarks; `python -m bench` runs them all and renders RESULTS.md."""
