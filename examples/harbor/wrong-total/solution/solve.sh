#!/usr/bin/env bash
sed -i 's/int(sys.argv\[1\])/int(sys.argv[1]) + 1/' total.py
