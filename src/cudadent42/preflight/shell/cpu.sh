model=$(sed -n 's/^model name[[:space:]]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)
cpu_model=${model:-$(uname -m)}
detail=$cpu_model
case $(uname -m) in
    x86_64)
        flags=$(grep -m 1 '^flags' /proc/cpuinfo 2>/dev/null || :)
        case $flags in *avx2*fma* | *fma*avx2*) ;; *) problem=no-avx2 ;; esac
        ;;
esac
governor=$(cat /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor 2>/dev/null || :)
if [ -z "$problem" ] && [ "$governor" = powersave ]; then
    problem=powersave
fi
