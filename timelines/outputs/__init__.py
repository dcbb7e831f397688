"""Files made of a trace: Chrome's JSON, TensorBoard's files, CSV and text tables."""
