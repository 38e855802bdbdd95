#!/usr/bin/env bash
# Install apptainer for tests, as root on Debian, which has it in its development branch alone and for a newer libc than a
# released one's. That libc goes into the package, for its two programs and nothing else; all else is of the release.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/apptainer
libc=/usr/lib/apptainer-libc
# shellcheck disable=SC2016  # apt fills it in
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sed -n 1p)

rm -rf "$work"
mkdir -p "$work"/{lists,cache/archives}/partial
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$work/sources.list"
development=(apt-get -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- -o Acquire::Languages=none
  -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
released=(apt-get install -y -qq --no-install-recommends)

cd "$work"
"${development[@]}" update
"${development[@]}" download apptainer libc6
"${released[@]}" patchelf
dpkg-deb --raw-extract apptainer_*.deb package
dpkg-deb --extract libc6_*.deb libc
mkdir package$libc
cp -a libc/usr/lib/*-linux-gnu/*.so* package$libc/
patchelf --set-interpreter $libc/ld-linux-x86-64.so.2 --force-rpath --set-rpath $libc \
  package/usr/bin/apptainer package/usr/lib/*-linux-gnu/apptainer/bin/starter
sed -i -E '/^Depends:/s/libc6 \([^)]*\), //' package/DEBIAN/control
rm package/DEBIAN/md5sums
dpkg-deb -Znone --build package apptainer.deb
# squashfuse mounts images: where root has not all capabilities, they cannot be unpacked. The last two are for disks of
# fixed size.
"${released[@]}" ./apptainer.deb squashfuse fuse2fs fuse-overlayfs
apptainer --version
rm -r "$work"
