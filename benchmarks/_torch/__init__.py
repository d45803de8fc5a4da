"""What PyTorch does with the problems of the benchmarks. Imported only where it is installed."""
