#!/bin/sh
# Stands in for scancel: notes its arguments.
echo "scancel $*" >> "$CALLS.cancelled"
