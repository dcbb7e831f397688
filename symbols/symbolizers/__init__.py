"""What names addresses of CPU code: binaries and their debug files, this boot's kernel, generated code."""
