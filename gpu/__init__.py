"""GPUs as data: generations, record layouts, stall reasons, instruction sets."""
