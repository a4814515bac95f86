"""What every service process needs: settings, logs, lifecycle, health, offsets, publishing."""
