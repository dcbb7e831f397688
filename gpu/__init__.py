"""What a GPU is, as data: generations, layouts of stall records, stall reasons, instruction sets."""
