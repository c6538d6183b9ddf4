"""What the screens are built from: functions that turn plain values into lines of styled text, and the one widget that shows them."""
