"""Commands and benchmarks: training, comparison, simulation, measured against predicted."""
