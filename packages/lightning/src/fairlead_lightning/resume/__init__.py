"""What makes a resumed run end with the same bits: loaders, generators, averages."""
